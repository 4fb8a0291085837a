"""A checkpoint of any layout is loaded on any other: parameters, masters and moments bit for bit, and the run goes on
with the same losses, bitwise where tp is the same.

The model has many buckets, tied embeddings, a vocabulary that no tp divides, and five blocks, which no pipeline
divides. What a checkpoint holds is read here from the files alone. A source's launch saves and trains on; a target's
launch loads all sources, one after the other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megacore.checkpoint.load import Reader
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly
from megacore.parallel.sharding import Slices
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import Layout, gather, make_config, make_trainer

KINDS = ("exp_avg", "exp_avg_sq")
CUBE = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2)]
ALL = [*CUBE, (4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 3, 1)]
# What differs between layouts beside their degrees; the stage of ZeRO is another one where it is the target.
STAGE = {layout: number % 4 for number, layout in enumerate(layout for layout in ALL if layout[2] > 1)}
SCHEDULE: dict[Layout, dict[str, Any]] = {
    (1, 2, 1): {"schedule": "interleaved", "virtual_stages": 2},
    (1, 4, 1): {"schedule": "zero-bubble"},
    (2, 2, 1): {"schedule": "gpipe"},
}
SOURCES: list[Layout] = [(1, 1, 1), (1, 2, 2), (4, 1, 1)]
TARGETS: list[Layout] = [(2, 2, 2), (1, 1, 4), (1, 2, 1)]
BEFORE = 2


def config_of(layout: Layout, directory: Path | str, *, turn: int = 0, load: Path | None = None) -> Any:
    changes = {**SCHEDULE.get(layout, {}), "zero_stage": (STAGE[layout] + turn) % 4 if layout in STAGE else 0}
    changes |= {"reproducible": True, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 30}
    return make_config(layout, directory, load=None if load is None else str(load), **changes)


def train(trainer: Trainer, steps: int) -> list[float]:
    return [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(steps)]


def whole_state(trainer: Trainer, mesh: Mesh) -> dict[str, dict[str, Tensor]]:
    """Masters of all ranks, whole, and on the first rank their moments."""
    optimizer = trainer.update.optimizer
    state = {"model": gather(trainer, mesh, lambda owned: owned.master, everywhere=True)}
    for kind in KINDS:
        state[kind] = gather(trainer, mesh, lambda owned: owned.state(optimizer, kind))  # noqa: B023
    return state


def stored(directory: Path) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint's files hold, put together by hand."""
    manifest = json.loads((directory / "manifest.json").read_text())
    files = {name: load_file(directory / name) for name in manifest["files"]}
    state: dict[str, dict[str, Tensor]] = {}
    for kind, table in manifest["tensors"].items():
        for name, entry in table.items():
            tensor = torch.full(entry["shape"], torch.nan)
            for piece in entry["pieces"]:
                where = tuple(slice(a, b) for a, b in zip(piece["start"], piece["stop"], strict=True))
                assert torch.isnan(tensor[where]).all(), "stored twice"
                tensor[where] = files[piece["file"]][name]
            assert not torch.isnan(tensor).any()
            state.setdefault(kind, {})[name] = tensor
    return state


def assert_equal(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys() == {"model", *KINDS}
    for kind, table in expected.items():
        assert found[kind].keys() == table.keys()
        for name, value in table.items():
            assert torch.equal(found[kind][name], value), (kind, name)
            assert value.any(), "a moment that is zero throughout"


def write(rank: int, world_size: int, layout: Layout, directory: str, steps: int) -> list[float]:
    """Train, save, and train on; the losses after the save."""
    config = config_of(layout, directory)
    compute_reproducibly()
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    train(trainer, BEFORE)
    trainer.save()
    state = whole_state(trainer, mesh)
    if rank == 0:
        assert_equal(stored(Path(directory) / f"step_{BEFORE:08d}"), state)
    return train(trainer, steps)


def read(rank: int, world_size: int, layout: Layout, turn: int, sources: list[str], steps: int) -> list[list[float]]:
    """Load each of the sources, compare, and train on; the losses after each load."""
    compute_reproducibly()
    mesh = build_mesh(config_of(layout, "none").parallel)
    losses = []
    for source in sources:
        config = config_of(layout, Path(source) / f"read-{turn}-{layout}", turn=turn, load=Path(source))
        trainer = make_trainer(config, mesh)
        state = whole_state(trainer, mesh)
        for name, parameter in trainer.model.parameters.items():  # ZeRO-3 has no whole ones
            if trainer.model.data_parallel.options.stage < 3:
                trainer.model.data_parallel.ready()
                own = parameter.spec.unpadded(parameter.detach())
                assert torch.equal(own, parameter.spec.take(state["model"][name])), name
        if rank == 0:
            assert_equal(state, stored(Path(source) / f"step_{BEFORE:08d}"))
        losses.append(train(trainer, steps))
    return losses


Written = dict[Layout, tuple[Path, list[float]]]


def write_all(folder: Path, sources: list[Layout], steps: int) -> Written:
    """Layout -> its checkpoint's run, and the losses after it."""
    written: Written = {}
    for layout in sources:
        directory, ranks = folder / "x".join(map(str, layout)), layout[0] * layout[1] * layout[2]
        losses = run_distributed(write, ranks, layout, str(directory), steps, timeout=200)[0]
        written[layout] = directory, losses
    return written


def check(written: Written, target: Layout, turn: int, steps: int) -> None:
    ranks, sources = target[0] * target[1] * target[2], [str(directory) for directory, _ in written.values()]
    # Of all sources at tp 4 about 50,000 all-reduces one after the other: 430 s on two busy cores.
    found = run_distributed(read, ranks, target, turn, sources, steps, timeout=900)[0]
    for (source, (_, expected)), losses in zip(written.items(), found, strict=True):
        if source[0] == target[0]:
            assert losses == expected[:steps], (source, target)
        else:
            assert losses == pytest.approx(expected[:steps], rel=1e-6), (source, target)


def test_some_layouts_load_into_others(tmp_path: Path) -> None:
    written = write_all(tmp_path, SOURCES, 2)
    for target in TARGETS:
        check(written, target, 1, 2)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Checkpoints of all layouts, and twenty losses after each."""
    return write_all(tmp_path_factory.mktemp("all"), ALL, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "turn"), [(layout, turn) for layout in ALL for turn in (range(4) if layout in STAGE else [0])], ids=str
)
def test_every_layout_loads_into_every_other(everything: Written, target: Layout, turn: int) -> None:
    check(everything, target, turn, 20 if turn == 0 else 2)


def count_reads(rank: int, world_size: int, source: str) -> tuple[int, int, int, int]:
    """Elements that a rank of ZeRO-3 reads, owns, touches as whole rows beyond that, and reads at once."""
    read, sizes = Reader.read, []

    def counting(self: Reader, kind: str, name: str, wanted: Slices, out: Tensor | None = None) -> Tensor:
        sizes.append(math.prod(stop - start for start, stop in wanted))
        return read(self, kind, name, wanted, out)

    setattr(Reader, "read", counting)  # noqa: B010
    config = make_config((1, 1, 4), source, load=source, zero_stage=3)
    data_parallel = make_trainer(config, build_mesh(config.parallel)).model.data_parallel
    owned = sum(owned.segment.stop - owned.segment.start for owned in data_parallel.segments)
    widths = {p.spec.name: math.prod(p.shape[1:]) for p in data_parallel.parameters}
    return sum(sizes), owned, sum(2 * widths[owned.spec.name] for owned in data_parallel.segments), max(sizes)


def test_a_rank_reads_the_rows_that_it_owns_and_no_more(tmp_path: Path) -> None:
    run_distributed(write, 1, (1, 1, 1), str(tmp_path), 0)
    total, largest = 0, 131 * 32
    for read_by_rank, owned, slack, at_once in run_distributed(count_reads, 4, str(tmp_path)):
        assert read_by_rank <= 3 * (owned + slack)
        assert at_once <= largest
        total += owned
    assert total < 75_000  # the whole model: each rank has a quarter of it
