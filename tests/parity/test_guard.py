"""A loss or gradient that is not finite on one rank: all skip the step, no weight changes, the culprit is named."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import TrainingStopped
from megacore.parallel.mesh import build_mesh
from megacore.parallel.sharding import GradientSum, sharded_parameters
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import Layout, gather, make_config, make_trainer

NAME = "blocks.2.mlp.down.weight"


def plant(trainer: Trainer, rank: int, culprit: int, value: float) -> list[bool]:
    """Make the gradient of NAME not finite on one rank while the returned switch is on."""
    switch = [False]
    parameter = trainer.parameters.get(NAME)
    if rank == culprit:
        assert parameter is not None
        parameter.register_hook(lambda gradient: gradient * value if switch[0] else gradient)
    return switch


def skip_one(
    rank: int, world_size: int, layout: Layout, directory: str, stage: int, culprit: int, value: float, precision: str
) -> tuple[str | None, float, bool, int]:
    scale: dict[str, Any] = {"hysteresis": 1, "initial_loss_scale": 65536.0}
    config = make_config(layout, directory, zero_stage=stage, precision=precision, num_layers=3, **scale)
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    switch = plant(trainer, rank, culprit, value)
    said: list[str] = []
    trainer.report.say = said.append  # type: ignore[assignment,method-assign]
    trainer.train_step(next(trainer.batches))
    before = gather(trainer, mesh, lambda owned: owned.master)
    switch[0] = True
    trainer.train_step(next(trainer.batches))
    switch[0] = False
    after = gather(trainer, mesh, lambda owned: owned.master)
    norm = trainer.train_step(next(trainer.batches)).grad_norm
    assert math.isfinite(norm)
    same = all(torch.equal(after[name], value) for name, value in before.items())
    return (said[0].splitlines()[0] if said else None), trainer.update.scaler.scale, same, trainer.update.skipped_steps


# Each with one of the two values, in turn; in `make test-slow` with the other one too.
CULPRITS: list[tuple[Layout, int, int]] = [
    ((1, 1, 1), 0, 0),
    ((2, 1, 1), 0, 1),
    ((1, 2, 2), 0, 2),
    ((1, 1, 2), 1, 1),
    ((1, 1, 2), 2, 0),
    ((1, 1, 2), 3, 1),
]
IN_TURN = [
    pytest.param(*culprit, value, marks=[pytest.mark.slow] if (number + turn) % 2 else [])
    for number, culprit in enumerate(CULPRITS)
    for turn, value in enumerate([math.nan, math.inf])
]


@pytest.mark.parametrize("layout, stage, culprit, value", IN_TURN, ids=str)
def test_all_ranks_skip_and_the_culprit_is_named(
    layout: Layout, stage: int, culprit: int, value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tp, pp, dp = layout
    directory = str(tmp_path_factory.mktemp("run"))
    results = run_distributed(skip_one, tp * pp * dp, layout, directory, stage, culprit, value, "fp32")
    for said, _, same, skipped in results:
        assert said == f"step 2/20 | skipped: the gradient of {NAME} on rank {culprit} is not finite"
        assert same
        assert skipped == 1


@pytest.mark.parametrize(
    "layout, stage, culprit",
    [
        ((1, 1, 2), 3, 1),
        ((2, 2, 1), 1, 2),
        pytest.param((1, 1, 2), 2, 1, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), 1, 2, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 3, 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_overflow_in_fp16_halves_the_scale_on_all_ranks(
    layout: Layout, stage: int, culprit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tp, pp, dp = layout
    directory = str(tmp_path_factory.mktemp("run"))
    results = run_distributed(skip_one, tp * pp * dp, layout, directory, stage, culprit, math.inf, "fp16")
    assert len(results) == tp * pp * dp
    assert {(scale, same, skipped) for _, scale, same, skipped in results} == {(32768.0, True, 1)}
    assert results[0][0] is not None
    assert results[0][0].endswith(f"the gradient of {NAME} on rank {culprit} overflowed; loss scale 65536 -> 32768")


def bad_loss(rank: int, world_size: int, directory: str) -> list[str]:
    """One data-parallel rank's loss is infinite though its gradients are not; three times in a row is too often."""
    config = make_config((1, 1, 2), directory, max_bad_steps=3, num_layers=1)
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    sound = trainer.task.loss
    extra = math.inf if rank == 1 else 0.0

    def loss(logits: Tensor, batch: object) -> Tensor:
        return sound(logits, batch) + extra

    trainer.task.loss = loss  # type: ignore[assignment,method-assign]
    said: list[str] = []
    trainer.report.say = said.append  # type: ignore[assignment,method-assign]
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    with pytest.raises(TrainingStopped, match=r"the loss was not finite for 3 steps in a row \(--max-bad-steps 3\)"):
        trainer.train_step(next(trainer.batches))
    return said


def test_a_loss_that_is_not_finite_counts_and_three_in_a_row_stop(tmp_path_factory: pytest.TempPathFactory) -> None:
    for said in run_distributed(bad_loss, 2, str(tmp_path_factory.mktemp("run"))):
        assert [line.splitlines()[0] for line in said] == [
            f"step {step}/20 | skipped: the loss is not finite" for step in (1, 2)
        ]


Spreading = tuple[Layout, dict[str, Any], int]  # the last is the culprit
# By the number of ranks; each row's cases run one after the other on the same ones.
SPREADING: dict[int, list[Spreading]] = {
    1: [
        ((1, 1, 1), {}, 0),
        ((1, 1, 1), {"reproducible": True}, 0),
    ],
    2: [
        ((1, 1, 2), {"zero_stage": 1, "bucket_size_mb": 25.0}, 1),
        ((1, 1, 2), {"zero_stage": 3}, 1),
        ((1, 2, 1), {"bucket_size_mb": 25.0}, 1),
        ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}, 1),
    ],
    4: [
        ((1, 2, 2), {"zero_stage": 2}, 3),
    ],
}


def spreads(rank: int, world_size: int, directory: str, cases: list[Spreading]) -> list[str]:
    """A NaN enters the backward where the last block's `mlp.down` ends, on one data-parallel rank, and spreads from
    there; what is said of it, case by case."""
    first_lines: list[str] = []
    for layout, changes, _ in cases:
        config = make_config(layout, directory, **{"num_layers": 3, **changes})
        mesh = build_mesh(config.parallel)
        trainer = make_trainer(config, mesh)
        said: list[str] = []
        trainer.report.say = said.append  # type: ignore[assignment,method-assign]
        last = f"blocks.{config.model.num_layers - 1}."
        for chunk in trainer.model.chunks if mesh.batch.is_last else ():
            for layer in chunk.layers:
                block: Any = layer
                if any(p.spec.name.startswith(last) for p in sharded_parameters(layer)):
                    block.mlp.down.register_full_backward_pre_hook(lambda module, grads: (grads[0] * math.nan,))
        trainer.train_step(next(trainer.batches))
        first_lines.append(said[0])
    return first_lines


@pytest.mark.parametrize("ranks", SPREADING)
def test_what_spreads_is_traced_to_where_it_began(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    cases = SPREADING[ranks]
    for lines in run_distributed(spreads, ranks, str(tmp_path_factory.mktemp("run")), cases):
        for said, (_, changes, culprit) in zip(lines, cases, strict=True):
            last = changes.get("num_layers", 3) - 1
            assert f"the gradient of blocks.{last}.mlp.down.bias on rank {culprit}" in said, changes


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


def planted(rank: int, world_size: int, directory: str, cases: list[tuple[Layout, dict[str, Any], str, int]]) -> Any:
    """What is said of a NaN that only `culprit`'s own gradient of `name` holds, case by case."""
    said: list[str] = []
    for layout, changes, name, culprit in cases:
        config = make_config(layout, directory, **changes)
        trainer = make_trainer(config, build_mesh(config.parallel))
        trainer.report.say = said.append  # type: ignore[assignment,method-assign]
        if rank == culprit:
            plant_in(trainer, name, math.nan)
        trainer.train_step(next(trainer.batches))
    return said


def test_the_rank_is_right_where_ranks_add_each_others_gradients(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With one replica gradients stay in `.grad`, and sums over positions and over copies are made there."""
    sequence: dict[str, Any] = {"sequence_parallel": True, "num_layers": 1}
    tied: dict[str, Any] = {"num_layers": 2}
    cases: list[tuple[Layout, dict[str, Any], str, int]] = [
        ((2, 1, 1), sequence, "head.norm.weight", 1),
        ((2, 1, 1), sequence, "head.norm.weight", 0),
        ((1, 2, 1), tied, "embedding.tokens.weight", 1),
        ((1, 2, 1), tied, "embedding.tokens.weight", 0),
    ]
    for said in run_distributed(planted, 2, str(tmp_path_factory.mktemp("run")), cases):
        for line, (_, _, name, culprit) in zip(said, cases, strict=True):
            first, *_ = line.splitlines()
            assert first == f"step 1/20 | skipped: the gradient of {name} on rank {culprit} is not finite"


def test_the_rank_is_right_in_its_own_shard_and_in_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On stage 1 the sum overwrites a rank's own gradients in its shard alone; here all lie in one bucket. Sums of one
    replica in 16 bits are made in place as well."""
    stage_1: dict[str, Any] = {"zero_stage": 1, "bucket_size_mb": 25.0, "num_layers": 1}
    bf16: dict[str, Any] = {"precision": "bf16", "num_layers": 2}
    cases: list[tuple[Layout, dict[str, Any], str, int]] = [
        *(((1, 1, 2), stage_1, name, rank) for name in ("head.norm.weight", "embedding.positions") for rank in (0, 1)),
        *(((2, 1, 1), bf16 | {"sequence_parallel": True}, "head.norm.weight", rank) for rank in (0, 1)),
        *(((1, 2, 1), bf16, "embedding.tokens.weight", rank) for rank in (0, 1)),
    ]
    for said in run_distributed(planted, 2, str(tmp_path_factory.mktemp("run")), cases):
        for line, (_, _, name, culprit) in zip(said, cases, strict=True):
            first, *_ = line.splitlines()
            assert first == f"step 1/20 | skipped: the gradient of {name} on rank {culprit} is not finite"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # gradients in `.grad`, and in a buffer of the bucket
def test_finite_gradients_whose_squares_overflow_are_called_just_that(
    precision: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Four microbatches of 2^67 each."""
    config = make_config((1, 1, 1), str(tmp_path_factory.mktemp("run")), precision=precision, num_layers=3)
    trainer = make_trainer(config, build_mesh(config.parallel))
    said: list[str] = []
    trainer.report.say = said.append  # type: ignore[assignment,method-assign]
    trainer.parameters[NAME].register_hook(lambda gradient: torch.full_like(gradient, 2.0**67))
    trainer.train_step(next(trainer.batches))
    expected = f"the sum of squared gradients in fp32 (largest entry 5.9e+20, of {NAME}) is not finite"
    (line,) = said
    first, *cause = line.splitlines()
    assert first == f"step 1/20 | skipped: {expected}"
    assert " ".join(cause).split()[:4] == ["cause", "likely", "cause:", "overflow:"]


def loss_in_fp16(rank: int, world_size: int, directory: str) -> tuple[list[str], list[float], list[float]]:
    """The forward gives NaN on one rank: the loss scale is not to blame. Then gradients overflow at the smallest
    scale."""
    scale = {"initial_loss_scale": 65536.0, "min_loss_scale": 65536.0, "hysteresis": 1}
    changes = {"precision": "fp16", "max_bad_steps": 3, "num_layers": 3, **scale}
    config = make_config((1, 1, 2), directory, **changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    sound, factor = trainer.task.loss, [math.nan]
    factors = lambda logits, batch: sound(logits, batch) * (factor[0] if rank == 1 else 1.0)  # noqa: E731
    trainer.task.loss = factors  # type: ignore[method-assign]
    said: list[str] = []
    trainer.report.say = said.append  # type: ignore[assignment,method-assign]
    counts, scales = [], []
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        counts.append(trainer.update.counters()["bad_steps"])
        scales.append(trainer.update.scaler.scale)
    saved = trainer.update.counters()
    trainer.update.load_counters({})
    trainer.update.load_counters(saved)  # a resumed run goes on counting
    with pytest.raises(TrainingStopped, match=r"the loss \(and .* on rank 1\) was not finite for 3 steps in a row"):
        trainer.train_step(next(trainer.batches))
    factor[0] = 1.0
    trainer.train_step(next(trainer.batches))
    counts.append(trainer.update.counters()["bad_steps"])
    if rank == 1:
        plant_in(trainer, NAME, math.inf)
    with pytest.raises(TrainingStopped, match=f"gradient of {NAME} on rank 1 overflowed fp16 even at the smallest"):
        trainer.train_step(next(trainer.batches))
    return said, counts, scales


def test_a_loss_that_is_not_finite_leaves_the_loss_scale_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    for said, counts, scales in run_distributed(loss_in_fp16, 2, str(tmp_path_factory.mktemp("run"))):
        assert [line.split(" (and")[0] for line in said] == [f"step {n}/20 | skipped: the loss" for n in (1, 2)]
        assert counts == [1, 2, 0]
        assert scales == [65536.0, 65536.0]
