"""A loss or gradient that is not finite on one rank: all skip the step, no weight changes, the culprit is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import TrainingDiverged, TrainingStopped
from megacore.parallel.mesh import build_mesh
from megacore.parallel.sharding import GradientSum, sharded_parameters
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import Heard, Layout, gather, make_config, make_trainer

Changes = dict[str, Any]
NAME = "blocks.2.mlp.down.weight"


def begin(layout: Layout, directory: str, **changes: Any) -> tuple[Trainer, list[str]]:
    """A run, and what it says."""
    config = make_config(layout, directory, **{"num_layers": 3, **changes})
    heard = Heard()
    return make_trainer(config, build_mesh(config.parallel), callbacks=[heard]), heard.said


def step(trainer: Trainer) -> float:
    """One step; its norm."""
    return float(trainer.train_step(next(trainer.batches)).grad_norm)


Skip = tuple[Layout, int, int, float, str]  # layout, ZeRO stage, culprit, value, precision


def skip_each(
    rank: int, world_size: int, directory: str, cases: list[Skip]
) -> list[tuple[str | None, float, bool, int]]:
    """Make the gradient of NAME not finite on one rank in the second of three steps: what is said, the loss scale,
    whether weights stayed, skipped steps."""
    found = []
    for layout, stage, culprit, value, precision in cases:
        scale = {"hysteresis": 1, "initial_loss_scale": 65536.0}
        trainer, said = begin(layout, directory, zero_stage=stage, precision=precision, **scale)
        factor, weights = [1.0], partial(gather, trainer, trainer.mesh, lambda owned: owned.master)
        if rank == culprit:
            trainer.parameters[NAME].register_hook(lambda gradient, factor=factor: gradient * factor[0])
        step(trainer)
        before = weights()
        factor[0] = value
        step(trainer)
        factor[0] = 1.0
        same = all(torch.equal(value, before[name]) for name, value in weights().items())
        assert math.isfinite(step(trainer))
        trainer.model.data_parallel.ready()
        update = trainer.update
        found.append((said[0].splitlines()[0] if said else None, update.scaler.scale, same, update.skipped_steps))
    return found


# Each with one of the two values, in turn; in `make test-slow` with the other one too. Keyed by the number of ranks.
CULPRITS: dict[int, list[tuple[Layout, int, int]]] = {
    1: [((1, 1, 1), 0, 0)],
    2: [((2, 1, 1), 0, 1), ((1, 1, 2), 2, 0), ((1, 1, 2), 3, 1)],
    4: [((1, 2, 2), 0, 2), ((1, 1, 4), 1, 1)],
}
OVERFLOWS: dict[int, list[tuple[Layout, int, int]]] = {
    2: [((1, 1, 2), 3, 1), ((1, 1, 2), 2, 1)],
    4: [((2, 2, 1), 1, 2), ((1, 2, 2), 1, 2)],
    8: [((2, 2, 2), 3, 5)],
}


def mostly_slow(ranks: Sequence[int], usual: int) -> list[Any]:
    """The numbers of ranks, of which one is for `make test`."""
    return [pytest.param(number, marks=() if number == usual else pytest.mark.slow) for number in ranks]


@pytest.mark.parametrize("values", [(math.nan, math.inf), pytest.param((math.inf, math.nan), marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", mostly_slow([*CULPRITS], 2))
def test_all_ranks_skip_and_the_culprit_is_named(ranks: int, values: tuple[float, float], tmp_path: Path) -> None:
    cases = [(*case, values[number % 2], "fp32") for number, case in enumerate(CULPRITS[ranks])]
    for of_rank in run_distributed(skip_each, ranks, str(tmp_path), cases):
        for (said, _, same, skipped), (_, _, culprit, _, _) in zip(of_rank, cases, strict=True):
            assert said == f"step 2/20 | skipped: the gradient of {NAME} on rank {culprit} is not finite"
            assert same and skipped == 1


@pytest.mark.parametrize("ranks", mostly_slow([*OVERFLOWS], 2))
def test_an_overflow_in_fp16_halves_the_scale_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    cases = [(*case, math.inf, "fp16") for case in OVERFLOWS[ranks]]
    found = run_distributed(skip_each, ranks, str(tmp_path), cases)
    assert {skip[1:] for of_rank in found for skip in of_rank} == {(32768.0, True, 1)}
    for (said, *_), (_, _, culprit, _, _) in zip(found[0], cases, strict=True):
        assert said is not None
        assert said.endswith(f"the gradient of {NAME} on rank {culprit} overflowed; loss scale 65536 -> 32768")


@dataclass(frozen=True)
class PlantedSum:
    """A sum of gradients that is multiplied by `value` whenever a look-up or a product has added to it."""

    inner: GradientSum
    value: float

    def buffer(self) -> tuple[Tensor, bool]:
        return self.inner.buffer()

    def added(self) -> None:
        self.inner.buffer()[0].mul_(self.value)
        self.inner.added()


def plant_in(trainer: Trainer, name: str, value: float) -> None:
    """Make one parameter's gradient what it is times `value`, where autograd gets it or where it is added to a sum."""
    parameter = trainer.parameters[name]
    if parameter.gradient_sum is None:
        parameter.register_hook(lambda gradient: gradient * value)
    else:
        parameter.gradient_sum = PlantedSum(parameter.gradient_sum, value)


def spread_from(trainer: Trainer, block: str) -> None:
    """A NaN enters the backward where a block's `mlp.down` ends, on one data-parallel rank, and spreads from there."""
    for layer in (layer for chunk in trainer.model.chunks for layer in chunk.layers):
        if trainer.mesh.batch.is_last and any(p.spec.name.startswith(block) for p in sharded_parameters(layer)):
            down: Any = layer.get_submodule("mlp.down")
            down.register_full_backward_pre_hook(lambda module, grads: (grads[0] * math.nan,))


Planted = tuple[Layout, Changes, str, int]  # what only the culprit's own gradient holds, or "" for one that spreads


def planted(rank: int, world_size: int, directory: str, cases: list[Planted]) -> list[str]:
    """What is said, case by case."""
    first_lines: list[str] = []
    for layout, changes, name, culprit in cases:
        trainer, said = begin(layout, directory, **changes)
        if not name:
            spread_from(trainer, f"blocks.{trainer.config.model.num_layers - 1}.")
        elif rank == culprit:
            plant_in(trainer, name, math.nan)
        step(trainer)
        first_lines += [text.splitlines()[0] for text in said]
    return first_lines


SEQUENCE: Changes = {"sequence_parallel": True, "num_layers": 1}
BF16: Changes = {"precision": "bf16", "num_layers": 2}
STAGE_1: Changes = {"zero_stage": 1, "bucket_size_mb": 25.0, "num_layers": 1}
TABLE, NORM = "embedding.tokens.weight", "head.norm.weight"
# By the number of ranks. With one replica gradients stay in `.grad`, and sums over positions and over copies are made
# there. On stage 1 the sum overwrites a rank's own gradients in its shard alone; there all lie in one bucket. Sums of
# one replica in 16 bits are made in place as well.
PLANTED: dict[int, list[Planted]] = {
    1: [((1, 1, 1), {}, "", 0), ((1, 1, 1), {"reproducible": True}, "", 0)],
    2: [
        ((1, 1, 2), {"zero_stage": 3}, "", 1),
        ((1, 2, 1), {"bucket_size_mb": 25.0}, "", 1),
        ((2, 1, 1), SEQUENCE, NORM, 1),
        ((1, 1, 2), STAGE_1, NORM, 0),
        ((1, 2, 1), BF16, TABLE, 1),
    ],
    4: [((1, 2, 2), {"zero_stage": 2}, "", 3)],
}
MORE_PLANTED: list[Planted] = [
    ((1, 1, 2), {"zero_stage": 1, "bucket_size_mb": 25.0}, "", 1),
    ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}, "", 1),
    ((2, 1, 1), SEQUENCE, NORM, 0),
    *(((1, 2, 1), {"num_layers": 2}, TABLE, rank) for rank in (0, 1)),
    *(((1, 1, 2), STAGE_1, name, rank) for name in (NORM, "embedding.positions") for rank in (0, 1)),
    *(((2, 1, 1), BF16 | {"sequence_parallel": True}, NORM, rank) for rank in (0, 1)),
    ((1, 2, 1), BF16, TABLE, 0),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, PLANTED[2]),
        *(pytest.param(ranks, cases, marks=pytest.mark.slow) for ranks, cases in ((1, PLANTED[1]), (4, PLANTED[4]))),
        pytest.param(2, MORE_PLANTED, marks=pytest.mark.slow),
    ],
)
def test_the_parameter_and_the_rank_where_it_began_are_named(ranks: int, cases: list[Planted], tmp_path: Path) -> None:
    for said in run_distributed(planted, ranks, str(tmp_path), cases):
        for line, (_, changes, name, culprit) in zip(said, cases, strict=True):
            name = name or f"blocks.{changes.get('num_layers', 3) - 1}.mlp.down.bias"
            assert line.startswith(f"step 1/20 | skipped: the gradient of {name} on rank {culprit}"), changes


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)]
)  # gradients in `.grad`, and in a buffer of the bucket
def test_finite_gradients_whose_squares_overflow_are_called_just_that(precision: str, tmp_path: Path) -> None:
    """Four microbatches of 2^67 each."""
    trainer, said = begin((1, 1, 1), str(tmp_path), precision=precision)
    trainer.parameters[NAME].register_hook(lambda gradient: torch.full_like(gradient, 2.0**67))
    result = trainer.train_step(next(trainer.batches))
    expected = f"the sum of squared gradients in fp32 (largest entry 5.9e+20, of {NAME}) is not finite"
    assert [text.splitlines()[0] for text in said] == [f"step 1/20 | skipped: {expected}"]
    assert result.diagnosis is not None and result.diagnosis.cause == "overflow"


def loss_in_fp16(rank: int, world_size: int, directory: str) -> tuple[list[str], list[float], list[float]]:
    """The forward gives NaN on one rank: the loss scale is not to blame. Then gradients overflow at the smallest
    scale."""
    scale = {"initial_loss_scale": 65536.0, "min_loss_scale": 65536.0, "hysteresis": 1}
    trainer, said = begin((1, 1, 2), directory, precision="fp16", max_bad_steps=3, **scale)
    sound, factor = trainer.task.loss, [math.nan]
    factors = lambda logits, batch: sound(logits, batch) * (factor[0] if rank == 1 else 1.0)  # noqa: E731
    trainer.task.loss = factors  # type: ignore[method-assign]
    counts, scales = [], []
    for _ in range(2):
        step(trainer)
        counts.append(trainer.update.counters()["bad_steps"])
        scales.append(trainer.update.scaler.scale)
    saved = trainer.update.counters()
    trainer.update.load_counters({})
    trainer.update.load_counters(saved)  # a resumed run goes on counting
    with pytest.raises(TrainingStopped, match=r"the loss \(and .* on rank 1\) was not finite for 3 steps in a row"):
        step(trainer)
    factor[0] = 1.0
    step(trainer)
    counts.append(trainer.update.counters()["bad_steps"])
    if rank == 1:
        plant_in(trainer, NAME, math.inf)
    told = (
        rf"(?s)gradient of {NAME} on rank 1 overflowed fp16 even at the smallest .*Use --precision bf16, a smaller --l"
    )
    with pytest.raises(TrainingDiverged, match=told):
        step(trainer)
    return [text.splitlines()[0] for text in said], counts, scales


def test_a_loss_that_is_not_finite_leaves_the_loss_scale_alone(tmp_path: Path) -> None:
    for said, counts, scales in run_distributed(loss_in_fp16, 2, str(tmp_path), stay=True):
        assert [line.split(" (and")[0] for line in said] == [f"step {n}/20 | skipped: the loss" for n in (1, 2)]
        assert counts == [1, 2, 0]
        assert scales == [65536.0, 65536.0]
