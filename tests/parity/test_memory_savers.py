"""Sequence parallelism and recomputation change no number; together with ZeRO and the pipeline neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacore.parallel.mesh import build_mesh
from megacore.train.trainer import Trainer
from tests.parity.runs import (
    Layout,
    Run,
    Size,
    agree,
    bitwise,
    in_both_sizes,
    make_config,
    make_trainer,
    small,
)

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
DROPOUT |= {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 2}


@in_both_sizes
@pytest.mark.parametrize(
    "layout, stage",
    [
        ((2, 1, 1), 0),
        ((4, 1, 1), 0),
        ((2, 2, 1), 0),
        ((2, 1, 2), 3),
        pytest.param((2, 1, 2), 1, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sequence_parallel_equals_one_process(layout: Layout, stage: int, size: Size, run: Run) -> None:
    changes = size(layout)
    agree(run(layout, sequence_parallel=True, zero_stage=stage, **changes), run((1, 1, 1), **changes))


@in_both_sizes
def test_sequence_parallel_with_sgd_equals_one_process(size: Size, run: Run) -> None:
    changes: dict[str, Any] = {**size((2, 2, 1)), "optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1, "clip_grad": 0.0}
    agree(run((2, 2, 1), sequence_parallel=True, **changes), run((1, 1, 1), **changes))


WAYS: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"recompute": "light"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_num_layers": 1},
]
# Each way on two of the three layouts, in turn; in `make test-slow` on the third one too.
IN_TURN = [
    pytest.param(layout, stage, changes, marks=[pytest.mark.slow] if (number + turn) % 3 == 2 else [])
    for number, (layout, stage) in enumerate([((1, 1, 1), 0), ((1, 2, 2), 3), ((2, 2, 1), 0)])
    for turn, changes in enumerate(WAYS)
]


@in_both_sizes
@pytest.mark.parametrize("layout, stage, changes", IN_TURN, ids=str)
def test_recomputation_changes_no_bit(
    layout: Layout, stage: int, changes: dict[str, Any], size: Size, run: Run
) -> None:
    """Dropout included."""
    plain = {**size(layout), **DROPOUT, "zero_stage": stage}
    bitwise(run(layout, **plain, **changes), run(layout, **plain))


@pytest.mark.parametrize("layout", [pytest.param((1, 2, 1), marks=pytest.mark.slow), (2, 2, 1)], ids=str)
def test_light_recomputation_with_a_split_backward_changes_no_bit(layout: Layout, run: Run) -> None:
    """The gradients of weights are computed later, from outputs of norms that are computed once more."""
    plain = {**small(layout), **DROPOUT, "schedule": "zero-bubble", "sequence_parallel": layout[0] > 1}
    bitwise(run(layout, **plain, recompute="light"), run(layout, **plain))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 2), {"ep": 2, "activation": "swiglu", "zero_stage": 3}),
        ((2, 1, 1), {"ep": 2, "etp": 1, "sequence_parallel": True}),
        ((1, 2, 1), {"schedule": "zero-bubble"}),
        ((2, 1, 1), {"reproducible": True}),
    ],
    ids=str,
)
def test_light_recomputation_of_experts_changes_no_bit(layout: Layout, changes: dict[str, Any], run: Run) -> None:
    plain = {"num_experts": 4, "disable_bias_linear": True, **changes}
    bitwise(run(layout, **plain, recompute="light"), run(layout, **plain))


@pytest.mark.parametrize("before, after", [("light", "light"), ("none", "light"), ("light", "none")])
def test_light_recomputation_resumes(before: str, after: str, tmp_path: Path) -> None:
    """From a checkpoint of a run with it or without it, to the same bits as an uninterrupted run."""

    def trainer(recompute: str, **changes: Any) -> Trainer:
        changes = {**DROPOUT, "train_iters": 4, "num_layers": 2, "recompute": recompute, **changes}
        config = make_config((1, 1, 1), tmp_path, **changes)
        return make_trainer(config, build_mesh(config.parallel))

    def steps(trainer: Trainer, count: int) -> list[str]:
        return [repr(float(trainer.train_step(next(trainer.batches)).loss)) for _ in range(count)]

    whole = steps(trainer("none"), 4)
    first = trainer(before)
    assert steps(first, 2) == whole[:2]
    first.save()
    assert steps(trainer(after, load=str(tmp_path)), 2) == whole[2:]


@in_both_sizes
def test_all_of_them_together(size: Size, run: Run) -> None:
    changes = {**size((2, 1, 2)), **DROPOUT, "sequence_parallel": True, "zero_stage": 2}
    bitwise(run((2, 1, 2), recompute="full", **changes), run((2, 1, 2), **changes))
