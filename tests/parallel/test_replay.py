"""A microbatch computed again: training stays bitwise what it was, and a rank that computes otherwise once is named."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.config import ResolvedConfig, WatchConfig
from megacore.errors import EXIT_CORRUPT, ConfigError, SilentCorruption
from megacore.layers.block import TransformerBlock
from megacore.models.plain import Layer
from megacore.observe.replay import Replay
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.launch import launch
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parallel.test_engine import engine_of
from tests.parity.runs import Layout, bitwise, make_config, make_trainer, train_on

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# Each with another way for gradients to arrive and to be added up.
KINDS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 1, 4), {}),
    ((2, 1, 2), {"sequence_parallel": True, "zero_stage": 1, **DROPOUT}),
    ((1, 2, 2), {"schedule": "zero-bubble", "zero_stage": 3, **DROPOUT}),
    ((2, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "precision": "bf16"}),
    ((1, 1, 4), {"zero_stage": 2, "precision": "bf16", "recompute": "full", **DROPOUT}),
    ((1, 4, 1), {"schedule": "gpipe"}),
    ((1, 2, 2), {"schedule": "zero-bubble", "reproducible": True, **DROPOUT}),
    ((1, 1, 4), {"precision": "fp16", "offload_optimizer": True, "zero_stage": 1}),
    ((2, 1, 2), {"precision": "bf16", "zero_stage": 3}),
    ((2, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "sequence_parallel": True, **DROPOUT}),
]


def with_and_without(rank: int, world_size: int, directory: str, kinds: list[tuple[Layout, dict[str, Any]]]) -> None:
    for number, (layout, changes) in enumerate(kinds):
        usual = {"num_layers": 4, "train_iters": 3, "log_interval": 2, "recompute": "none", **changes}
        plain, watched = (
            make_config(layout, f"{directory}/{number}", replay_interval=n, check_replicas_interval=n, **usual)
            for n in (0, 1)
        )
        mesh = build_mesh(plain.parallel)
        bitwise(train_on(mesh, watched), train_on(mesh, plain))


@pytest.mark.parametrize("kinds", [KINDS[1:3], pytest.param([KINDS[0], *KINDS[3:]], marks=pytest.mark.slow)])
def test_replays_and_checks_of_copies_change_no_bit_and_raise_no_alarm(
    kinds: list[tuple[Layout, dict[str, Any]]], tmp_path: Path
) -> None:
    run_distributed(with_and_without, 4, str(tmp_path), kinds, timeout=120, stay=True)


class Fault:
    """A module of one rank computes once with a flipped bit: its output, or the gradient of its output.

    Args:
        trainer: of this rank.
        draw: decides the module and the bit; the same on every rank.
        rank: that has the fault.
        replay: whether in the second of both computations.
        backward: whether in backward.
    """

    def __init__(self, trainer: Trainer, draw: random.Random, *, rank: int, replay: bool, backward: bool) -> None:
        self._calls, self._at, self._backward, self._draw = 0, 0, backward, draw
        if trainer.mesh.world.rank != rank:
            return
        layers = [layer for chunk in trainer.model.chunks for layer in chunk.layers]
        module = draw.choice([layer for layer in layers if isinstance(layer, TransformerBlock)])
        training = trainer.config.training
        microbatches = training.global_batch_size // training.micro_batch_size // trainer.mesh.batch.size
        # Two steps, of which the second is replayed; the first microbatch's backward is the first.
        self._at = microbatches + (microbatches if replay else 0)
        module.register_forward_hook(self.after)

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self._calls == self._at:
            if self._backward:
                output.register_hook(self.flipped)
            else:
                output.data.copy_(self.flipped(output))
        self._calls += 1

    def flipped(self, values: Tensor) -> Tensor:
        changed = values.detach().clone()
        token = values.shape[-1]  # of the first: all others may be masked in the loss
        changed.view(-1).view(torch.int32)[self._draw.randrange(token)] ^= 1 << 21
        return changed


def faulty(rank: int, world_size: int, directory: str, trials: Sequence[int]) -> list[tuple[int, str]]:
    found = []
    for seed in trials:
        draw = random.Random(seed)
        layout = draw.choice([(1, 1, 4), (1, 2, 2), (2, 1, 2)])
        config = make_config(layout, f"{directory}/{seed}", num_layers=4, train_iters=2, replay_interval=2)
        odd, said = draw.randrange(world_size), ""
        trainer = make_trainer(config, build_mesh(config.parallel))
        Fault(trainer, draw, rank=odd, replay=seed % 2 == 1, backward=seed % 4 > 1)
        try:
            trainer.run()
        except SilentCorruption as error:
            said = str(error)
        found.append((odd, f"{layout} {said}"))
    return found


@pytest.mark.parametrize("trials", [[2], pytest.param(range(100, 108), marks=pytest.mark.slow)], ids=str)
def test_a_rank_that_computes_otherwise_once_is_named(trials: Sequence[int], tmp_path: Path) -> None:
    ranks = run_distributed(faulty, 4, str(tmp_path), trials, timeout=120)
    for seed, results in zip(trials, zip(*ranks, strict=True), strict=True):
        odd, said = results[0]
        assert all(other == results[0] for other in results), "the same on every rank"
        assert "step 2: a microbatch that was computed again gave other numbers" in said, (seed, odd, said)
        named = rf"\n  rank {odd} \(pp \d, dp \d, tp \d, on \S+\), microbatch \d+: .*in forward order (first )?\w"
        assert re.search(named, said), (seed, odd, said)
        if said.startswith("(1, 1, 4)"):  # other replicas have computed their own microbatches
            assert said.count("\n  rank ") == 1, said


def launched(rank: int, world_size: int, directory: str) -> int:
    config = make_config(
        (1, 1, 1), directory, train_iters=2, lr_warmup_iters=1, replay_interval=2, hang_timeout_minutes=0.0
    )

    def body(config: ResolvedConfig, mesh: Mesh) -> None:
        trainer = make_trainer(config, mesh)
        Fault(trainer, random.Random(1), rank=0, replay=True, backward=False)
        trainer.run()

    return launch(config, body)


def test_the_process_ends_with_status_3_and_saves_nothing(tmp_path: Path) -> None:
    assert run_distributed(launched, 1, str(tmp_path), init=False) == [EXIT_CORRUPT] == [3]
    assert not list(tmp_path.glob("step_*"))


LAYERS = [
    Layer("a", nn.Linear, 6, 6),
    Layer("norm", nn.BatchNorm1d, 6),
    Layer("drop", nn.Dropout, 0.3),
    Layer("b", nn.Linear, 6, 6).tied({"weight": "a.weight"}),
]


def engines(rank: int, world_size: int) -> None:
    states = []
    for interval in (0, 1):
        watch = WatchConfig(replay_interval=interval, check_replicas_interval=1)
        engine = engine_of(LAYERS, 2, 2, parallel={"pipeline_balance": "uniform"}, watch=watch)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(2, 12, 6, generator=draw)
            engine.train_batch(engine.split(x, y))
        states.append(engine.state_dict())
    assert "norm.running_mean" in states[0]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_an_engine_with_replays_keeps_every_bit_of_weights_and_buffers() -> None:
    run_distributed(engines, 4)


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, replay_interval=5)
    model: Any = None
    with pytest.raises(ConfigError, match="--replay-interval 5 compares bits, but operators of cuda may"):
        Replay(model, config, Mesh(device=torch.device("cuda")))
    file = tmp_path / "own.csv"
    file.write_text(",".join(f"0F{i},0I{i}" for i in range(4)) + ",0W1,0W0,0W2,0W3\n")
    own = make_config((1, 1, 1), tmp_path / "out", replay_interval=5, schedule_csv=str(file))
    make_trainer(own, build_mesh(own.parallel))  # one stage: any microbatch may be the first
