"""Why a step is not finite: weights, moments, data or overflow, with the parameter, the rank and the microbatch;
all ranks skip it, and no weight changes. The gradient noise against its formula in fp64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megacore.errors import CheckpointError, SilentCorruption, TrainingDiverged, TrainingStopped
from megacore.observe.gradient_noise import GradientNoise
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.sharding import GradientAccumulator, sharded_parameters
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from megacore.zero.data_parallel import CHECKED_IN
from tests.distributed import run_distributed
from tests.parity import runs
from tests.parity.runs import VOCAB, Heard, Layout, RaggedData, bitwise, gather, make_config, make_trainer, outcome_of

NAME = "blocks.1.mlp.down.weight"
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 2, 2), {"zero_stage": 2}),
    # In `make test-slow`.
    ((2, 1, 2), {"zero_stage": 3, "precision": "bf16"}),
    ((1, 2, 2), {"zero_stage": 1, "schedule": "zero-bubble", "reproducible": True}),
    ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 1}),
    ((2, 2, 1), {"precision": "fp16", "loss_scale": 8.0}),
]


class Described(RaggedData):
    """Samples whose documents have a name, and of which one may have a loss mask that is infinite."""

    def __init__(self, samples: int, bad: int | None = None) -> None:
        super().__init__(samples)
        self._bad = bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index == self._bad:
            sample["loss_mask"] = np.full_like(sample["loss_mask"], np.inf)
        return sample

    def documents_of(self, index: int) -> str:
        return f"document {100 + index}"


def start(
    mesh: Mesh | None, layout: Layout, directory: str, changes: dict[str, Any], bad: int | None = None
) -> Trainer:
    config = make_config(layout, directory, num_layers=4, **changes)
    return make_trainer(config, mesh or build_mesh(config.parallel), Described(200, bad))


def step(trainer: Trainer) -> StepResult:
    return trainer.train_step(next(trainer.batches))


def holder_of(trainer: Trainer, name: str) -> int:
    """The first rank that updates a part of a parameter; all ranks call this together."""
    has = bool(trainer.model.data_parallel.segments_of(name)) if name in trainer.parameters else False
    holders: list[bool] = all_gather_objects(has, trainer.mesh.world)
    return holders.index(True)


def cases(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    first = start(None, layout, directory, changes)
    mesh = first.mesh
    data_is_to_blame(first)
    gradients_are_traced_to_their_microbatch(start(mesh, layout, directory, changes), layout)
    masks_are_looked_at(start(mesh, layout, directory, changes, bad=9), layout)
    large_activations_are_an_overflow(start(mesh, layout, directory, changes))
    a_fault_that_does_not_come_back_is_hardware(start(mesh, layout, directory, changes))
    weights_are_to_blame(start(mesh, layout, directory, changes))
    moments_are_to_blame(start(mesh, layout, directory, changes))


def data_is_to_blame(trainer: Trainer) -> None:
    """The loss of the last microbatch of the last replica is NaN, whatever computes it."""
    sound = trainer.task.loss
    last = trainer.config.training.global_batch_size // trainer.config.training.micro_batch_size - 1

    def loss(output: Tensor, microbatch: Any) -> Tensor:
        return sound(output, microbatch) * (math.nan if microbatch.index == last else 1.0)

    trainer.task.loss = loss  # type: ignore[method-assign]
    found = step(trainer)
    assert found.skipped is not None
    assert found.diagnosis is not None
    assert found.diagnosis.cause == "data"
    size = trainer.config.training.micro_batch_size
    samples = f"samples {8 - size} to 7" if size > 1 else "sample 7"
    assert f"the loss of 1 of {last + 1} microbatches is not finite" in str(found.diagnosis)
    assert f"replica {trainer.mesh.batch.size - 1}" in str(found.diagnosis)
    assert f"{samples}: document {108 - size}" in str(found.diagnosis)
    assert "other microbatches are finite" in str(found.diagnosis)


def gradients_are_traced_to_their_microbatch(trainer: Trainer, layout: Layout) -> None:
    """Of one parameter, in one microbatch, with finite losses."""
    count = trainer.config.training.global_batch_size // trainer.config.training.micro_batch_size
    target, streams = count - 2, trainer.task.streams

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * (math.nan if streams.microbatch == target else 1.0)

    if NAME in trainer.parameters:
        trainer.parameters[NAME].register_hook(spoil)
    found = step(trainer)
    assert found.diagnosis is not None
    assert f"the gradient of {NAME} on rank" in str(found.diagnosis)
    size = trainer.config.training.micro_batch_size
    expected = f"samples {target * size} to {target * size + size - 1}:" if size > 1 else f"sample {target}:"
    assert expected in str(found.diagnosis)
    assert found.diagnosis.cause == ("overflow" if trainer.config.precision.precision == "fp16" else "data")


def a_fault_that_does_not_come_back_is_hardware(trainer: Trainer) -> None:
    """In an activation, then in a gradient: no sample is named, and the run ends as one on a faulty machine."""
    once: list[float] = []

    def spoil(value: Tensor) -> Tensor:
        return value * (once.pop() if once else 1.0)

    culprit = holder_of(trainer, NAME)
    if trainer.mesh.world.rank == culprit:
        chunk = next(chunk for chunk in trainer.model.chunks if "blocks.1" in chunk.names)
        chunk.layers[chunk.names.index("blocks.1")].register_forward_hook(lambda module, given, output: spoil(output))
    step(trainer)
    for evidence in ("the loss of", "the step is finite if"):
        once.append(math.nan)
        found = step(trainer)
        assert found.diagnosis is not None
        assert str(found.diagnosis).startswith(f"likely cause: hardware: {evidence}")
        assert "finite if it is computed again" in str(found.diagnosis)
        assert "document" not in str(found.diagnosis)
        assert "the largest weight is " in str(found.diagnosis)
        if trainer.mesh.world.rank == culprit and evidence == "the loss of":
            chunk.layers[chunk.names.index("blocks.1")]._forward_hooks.clear()
            trainer.parameters[NAME].register_hook(spoil)


def masks_are_looked_at(trainer: Trainer, layout: Layout) -> None:
    """Sample 9 is of the second step."""
    assert step(trainer).diagnosis is None
    found = step(trainer)
    assert found.diagnosis is not None
    assert found.diagnosis.cause == "data"
    assert "loss_mask of microbatch" in str(found.diagnosis)
    assert "document 109" in str(found.diagnosis)


def large_activations_are_an_overflow(trainer: Trainer) -> None:
    """Weights that are finite, of a block in the middle, give activations that are not."""
    for local in trainer.model.data_parallel.segments:
        if local.spec.name in ("blocks.1.mlp.up.weight", NAME):
            local.master.fill_(1e25 if trainer.config.precision.precision != "fp16" else 6e4)
    trainer.model.data_parallel.publish()
    found = step(trainer)
    assert found.diagnosis is not None
    assert "in forward order: the output of blocks.1 on rank" in str(found.diagnosis)


def weights_are_to_blame(trainer: Trainer) -> None:
    """One number of one weight on one rank: it spreads to all activations after it and all gradients before it."""
    culprit = holder_of(trainer, NAME)
    if trainer.mesh.world.rank == culprit:
        trainer.model.data_parallel.segments_of(NAME)[0].master[1] = math.nan
    trainer.model.data_parallel.publish()
    text = rf"step 1 is not finite, likely cause: weights: first in forward order {NAME} on rank {culprit} \(1 of "
    with pytest.raises(TrainingDiverged, match=text):
        step(trainer)


def test_every_weight_is_checked_in_turn(tmp_path: Path) -> None:
    """A part of them a step; here the first and the last number of each."""
    config = make_config((1, 1, 1), tmp_path, num_layers=1, precision="bf16")
    data_parallel = make_trainer(config, Mesh(device=torch.device("cpu"))).model.data_parallel
    for parameter in data_parallel.parameters:
        for place in (0, -1):
            flat, before = parameter.data.view(-1), float(parameter.data.view(-1)[place])
            flat[place] = math.nan
            checks = [float(data_parallel.weight_check(step)) for step in range(CHECKED_IN)]
            assert sum(map(math.isnan, checks)) == 1
            flat[place] = before


def moments_are_to_blame(trainer: Trainer) -> None:
    """A second moment that is infinite freezes its weight silently: it is found before a checkpoint has it."""
    step(trainer)
    culprit = holder_of(trainer, NAME)
    if trainer.mesh.world.rank == culprit:
        square = trainer.model.data_parallel.segments_of(NAME)[0].state(trainer.update.optimizer, "exp_avg_sq")
        assert square is not None
        square[0] = math.inf
    text = rf"after step 1 .* not saved: first in forward order exp_avg_sq of {NAME} on rank {culprit} \(1 of"
    with pytest.raises(TrainingDiverged, match=text):
        trainer.save()
    for chunk in trainer.model.chunks if trainer.mesh.pipeline.is_last else ():
        chunk.layers[-1].register_forward_hook(lambda module, inputs, output: output * math.nan)
    with pytest.raises(TrainingDiverged, match=rf"likely cause: moments: first in forward order exp_avg_sq of {NAME}"):
        step(trainer)


@pytest.mark.parametrize(
    ("layout", "changes"), [LAYOUTS[0], *(pytest.param(*more, marks=pytest.mark.slow) for more in LAYOUTS[1:])], ids=str
)
def test_the_cause_is_named(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    run_distributed(cases, math.prod(layout), layout, str(tmp_path), changes)


def one_of_two_copies(rank: int, world_size: int, directory: str) -> None:
    """Updates are equal on both ranks, so a machine has erred: status 3, not 4."""
    trainer = start(None, (1, 1, 2), directory, {"check_replicas_interval": 0})
    segment = trainer.model.data_parallel.segments_of(NAME)[0]
    if rank == 1:
        segment.master[1] = math.nan
    trainer.model.data_parallel.publish()
    evidence = (
        r" on rank 1 \(1 of .*its copies on rank 0 are finite, .* processor of \S+ \(rank 1\) may be faulty\. Con"
    )
    with pytest.raises(SilentCorruption, match=rf"after step 0 .* not saved: first in forward order {NAME}{evidence}"):
        trainer.save()
    with pytest.raises(SilentCorruption, match=rf"likely cause: weights: first in forward order {NAME}{evidence}"):
        step(trainer)
    segment.master[1] = math.nan  # on both: this may be the training
    trainer.model.data_parallel.publish()
    with pytest.raises(TrainingDiverged, match=r"rank 0 \(1 of .*\. If the same step fails again, the run diverges"):
        step(trainer)


def test_a_weight_that_is_not_finite_in_one_copy_is_corruption(tmp_path: Path) -> None:
    run_distributed(one_of_two_copies, 2, str(tmp_path))


def test_a_checkpoint_that_is_not_finite_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(device=torch.device("cpu"))
    trainer = start(mesh, (1, 1, 1), str(tmp_path), {})
    step(trainer)
    trainer.model.data_parallel.segments_of("blocks.0.attention.qkv.weight")[0].master[3:5] = math.inf
    with pytest.raises(TrainingDiverged, match=r"blocks\.0\.attention\.qkv\.weight on rank 0 \(2 of 3,072 numbers\)"):
        trainer.save()
    assert not list(tmp_path.glob("step_*"))
    monkeypatch.setattr(trainer.train_steps, "require_finite", lambda: None)  # a checkpoint from elsewhere
    trainer.save()
    with pytest.raises(CheckpointError, match=r"not finite, first in forward order blocks\.0\.attention\.qkv\.weight"):
        start(mesh, (1, 1, 1), str(tmp_path), {"load": str(tmp_path / "step_00000001")})


def test_a_loss_beyond_reason_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the loss overflows, and that is the likely cause."""
    config = make_config((1, 1, 1), tmp_path, num_layers=1, log_interval=1, train_iters=3, max_bad_steps=1)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")), Described(200))
    sound, factors = trainer.task.loss, chain([1e11] * 4, repeat(math.inf))
    trainer.task.loss = lambda output, microbatch: sound(output, microbatch) * next(factors)  # type: ignore[method-assign]
    remark = r"the loss of the last step that updated the weights was \d\.\de?"
    with pytest.raises(TrainingStopped, match=rf"likely cause: overflow: .*{remark}"):
        trainer.run()
    assert "of step 1 is beyond that of a model that knows nothing" in capsys.readouterr().out


# ---- the guard -------------------------------------------------------------------------------------------------------

Changes = dict[str, Any]
DOWN = "blocks.2.mlp.down.weight"


def begin(layout: Layout, directory: str, **changes: Any) -> tuple[Trainer, list[str]]:
    """A run, and what it says."""
    config = make_config(layout, directory, **{"num_layers": 3, **changes})
    heard = Heard()
    return make_trainer(config, build_mesh(config.parallel), callbacks=[heard]), heard.said


def norm_of_step(trainer: Trainer) -> float:
    """One step; its norm."""
    return float(trainer.train_step(next(trainer.batches)).grad_norm)


Skip = tuple[Layout, int, int, float, str]  # layout, ZeRO stage, culprit, value, precision


def skip_each(
    rank: int, world_size: int, directory: str, cases: list[Skip]
) -> list[tuple[str | None, float, bool, int]]:
    """Make the gradient of DOWN not finite on one rank in the second of three steps: what is said, the loss scale,
    whether weights stayed, skipped steps."""
    found = []
    for layout, stage, culprit, value, precision in cases:
        scale = {"hysteresis": 1, "initial_loss_scale": 65536.0}
        trainer, said = begin(layout, directory, zero_stage=stage, precision=precision, **scale)
        factor, weights = [1.0], partial(gather, trainer, trainer.mesh, lambda owned: owned.master)
        if rank == culprit:
            trainer.parameters[DOWN].register_hook(lambda gradient, factor=factor: gradient * factor[0])
        norm_of_step(trainer)
        before = weights()
        factor[0] = value
        norm_of_step(trainer)
        factor[0] = 1.0
        same = all(torch.equal(value, before[name]) for name, value in weights().items())
        assert math.isfinite(norm_of_step(trainer))
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
            assert said == f"step 2/20 | skipped: the gradient of {DOWN} on rank {culprit} is not finite"
            assert same and skipped == 1


@pytest.mark.parametrize("ranks", mostly_slow([*OVERFLOWS], 2))
def test_an_overflow_in_fp16_halves_the_scale_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    cases = [(*case, math.inf, "fp16") for case in OVERFLOWS[ranks]]
    found = run_distributed(skip_each, ranks, str(tmp_path), cases)
    assert {skip[1:] for of_rank in found for skip in of_rank} == {(32768.0, True, 1)}
    for (said, *_), (_, _, culprit, _, _) in zip(found[0], cases, strict=True):
        assert said is not None
        assert said.endswith(f"the gradient of {DOWN} on rank {culprit} overflowed; loss scale 65536 -> 32768")


@dataclass(frozen=True)
class PlantedSum:
    """A sum of gradients that is multiplied by `value` whenever a look-up or a product has added to it."""

    inner: GradientAccumulator
    value: float
    discards: bool = False

    def buffer(self) -> tuple[Tensor, bool]:
        return self.inner.buffer()

    def added(self) -> None:
        self.inner.buffer()[0].mul_(self.value)
        self.inner.added()

    def add_rows(self, rows: Tensor, terms: Tensor) -> None:
        self.inner.add_rows(rows, terms * self.value)


def plant_in(trainer: Trainer, name: str, value: float) -> None:
    """Make one parameter's gradient what it is times `value`, where autograd gets it or where it is added to a sum."""
    parameter = trainer.parameters[name]
    if parameter.accumulator is None:
        parameter.register_hook(lambda gradient: gradient * value)
    else:
        parameter.accumulator = PlantedSum(parameter.accumulator, value)


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
        norm_of_step(trainer)
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
    trainer.parameters[DOWN].register_hook(lambda gradient: torch.full_like(gradient, 2.0**67))
    result = trainer.train_step(next(trainer.batches))
    expected = f"the sum of squared gradients in fp32 (largest entry 5.9e+20, of {DOWN}) is not finite"
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
        norm_of_step(trainer)
        counts.append(trainer.update.counters()["bad_steps"])
        scales.append(trainer.update.scaler.scale)
    saved = trainer.update.counters()
    trainer.update.load_counters({})
    trainer.update.load_counters(saved)  # a resumed run goes on counting
    with pytest.raises(TrainingStopped, match=r"the loss \(and .* on rank 1\) was not finite for 3 steps in a row"):
        norm_of_step(trainer)
    factor[0] = 1.0
    norm_of_step(trainer)
    counts.append(trainer.update.counters()["bad_steps"])
    if rank == 1:
        plant_in(trainer, DOWN, math.inf)
    told = rf"(?s)gradient of {DOWN} on rank 1 overflowed fp16 even at the smallest .*e --precision bf16, a smaller --l"
    with pytest.raises(TrainingDiverged, match=told):
        norm_of_step(trainer)
    return [text.splitlines()[0] for text in said], counts, scales


def test_a_loss_that_is_not_finite_leaves_the_loss_scale_alone(tmp_path: Path) -> None:
    for said, counts, scales in run_distributed(loss_in_fp16, 2, str(tmp_path), stay=True):
        assert [line.split(" (and")[0] for line in said] == [f"step {n}/20 | skipped: the loss" for n in (1, 2)]
        assert counts == [1, 2, 0]
        assert scales == [65536.0, 65536.0]


# ---- gradient noise --------------------------------------------------------------------------------------------------


STEPS = 3


def trainer_of(layout: Layout, directory: Path | str, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": STEPS, "log_interval": 1, "micro_batch_size": 2 // layout[2]}
    return runs.trainer_of(layout, directory, **{**fixed, "gradient_noise_interval": 1, **changes})


def square_norm(trainer: Trainer, microbatches: list[Any]) -> float:
    """The squared norm of the mean gradient of microbatches, by torch's own cross-entropy; summed in fp64."""
    model, loss, count = trainer.model.chunks[0], torch.zeros(()), 0.0
    for microbatch in microbatches:
        logits: Tensor = model(microbatch.tokens)[..., :VOCAB]
        losses = F.cross_entropy(logits.flatten(0, 1), microbatch.labels.flatten(), reduction="none")
        loss = loss + (losses * microbatch.loss_mask.flatten()).sum()
        count += float(microbatch.loss_mask.sum())
    gradients = torch.autograd.grad(loss / count, [p for p in model.parameters() if p.requires_grad])
    return sum(float(gradient.double().square().sum()) for gradient in gradients)


def averages(trainer: Trainer) -> list[float]:
    hook = trainer.train_steps.hook(GradientNoise)
    assert hook is not None
    return hook.series()["gradient_noise"]


def test_it_is_that_of_the_formula(tmp_path: Path) -> None:
    trainer, signal, noise = trainer_of((1, 1, 1), tmp_path), 0.0, 0.0
    for number in range(STEPS):
        microbatches = next(trainer.batches)
        small, large = square_norm(trainer, microbatches[:1]), square_norm(trainer, microbatches)
        signal = 0.95 * signal + 0.05 * (8 * large - 2 * small) / 6
        noise = 0.95 * noise + 0.05 * (small - large) / (1 / 2 - 1 / 8)
        trainer.train_step(microbatches)
        assert averages(trainer) == pytest.approx([signal, noise], rel=1e-4)
        if number == 1:
            trainer.save()
    again = trainer_of((1, 1, 1), tmp_path, load=str(tmp_path))
    again.run()
    assert averages(again) == averages(trainer)
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert record["train/gradient_noise_scale"] == (noise / signal if min(noise, signal) > 0 else None) or (
        record["train/gradient_noise_scale"] == pytest.approx(noise / signal, rel=1e-3)
    )


def test_training_computes_the_same_bits(tmp_path: Path) -> None:
    changes: Changes = {"hidden_dropout": 0.1, "precision": "bf16"}
    first, second = (
        outcome_of(trainer_of((1, 1, 1), tmp_path, gradient_noise_interval=interval, **changes), moments=True)
        for interval in (0, 2)
    )
    bitwise(first, second)


def measured(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> list[float]:
    trainer = trainer_of(layout, directory, **changes)
    trainer.run()
    return averages(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 1), {"sequence_parallel": True}),
        ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}),
        ((1, 2, 1), {"schedule": "zero-bubble"}),
        ((1, 1, 2), {"zero_stage": 1, "offload_optimizer": True}),
        ((1, 1, 2), {"zero_stage": 3}),
        ((1, 1, 2), {"ep": 2, "zero_stage": 2, "num_experts": 4, "moe_ffn_hidden_size": 16}),
    ],
    ids=str,
)
def test_every_layout_measures_the_same(layout: Layout, changes: Changes, tmp_path: Path) -> None:
    found = run_distributed(measured, 2, str(tmp_path / "two"), layout, changes, timeout=120)
    parallel = ("sequence_parallel", "schedule", "virtual_stages", "zero_stage", "offload_optimizer", "ep")
    alone = {name: value for name, value in changes.items() if name not in parallel}
    expected = measured(0, 1, str(tmp_path / "one"), (1, 1, 1), alone)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-4)
