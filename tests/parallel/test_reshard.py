"""What a checkpoint holds, read from the files alone, and what of it a rank reads. That any layout goes on with the
checkpoint of any other are rows of tests/matrix.

The model has many buckets, tied embeddings, a vocabulary that no tp divides, and five blocks, which no pipeline
divides.
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
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.sharding import Slices
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import Layout, gather, make_config, make_trainer

KINDS = ("exp_avg", "exp_avg_sq")


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


def save(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    """Take two steps, save, and compare the files with the state of all ranks."""
    config = make_config(layout, directory, micro_batch_size=1, global_batch_size=4, **changes)
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()
    state = whole_state(trainer, mesh)
    if rank == 0:
        assert_equal(stored(Path(directory) / "step_00000002"), state)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 2), {"zero_stage": 3}),
        pytest.param((1, 2, 2), {"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param((4, 1, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_files_hold_the_state_of_all_ranks(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    run_distributed(save, layout[0] * layout[1] * layout[2], layout, str(tmp_path), changes)


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
    run_distributed(save, 1, (1, 1, 1), str(tmp_path), {})
    total, largest = 0, 131 * 32
    for read_by_rank, owned, slack, at_once in run_distributed(count_reads, 4, str(tmp_path)):
        assert read_by_rank <= 3 * (owned + slack)
        assert at_once <= largest
        total += owned
    assert total < 75_000  # the whole model: each rank has a quarter of it
