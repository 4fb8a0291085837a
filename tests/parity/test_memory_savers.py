"""Sequence parallelism and recomputation change no number; together with ZeRO and the pipeline neither."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.runs import Layout, Run, agree, bitwise

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "micro_batch_size": 1, "train_iters": 4}


@pytest.mark.parametrize(
    "layout, stage", [((2, 1, 1), 0), ((4, 1, 1), 0), ((2, 2, 1), 0), ((2, 1, 2), 1), ((2, 2, 2), 3)], ids=str
)
def test_sequence_parallel_equals_one_process(layout: Layout, stage: int, run: Run) -> None:
    agree(run(layout, sequence_parallel=True, zero_stage=stage), run((1, 1, 1)))


def test_sequence_parallel_with_sgd_equals_one_process(run: Run) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1, "clip_grad": 0.0}
    agree(run((2, 2, 1), sequence_parallel=True, **changes), run((1, 1, 1), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "selective"},
        {"recompute": "light"},
        {"recompute": "full"},
        {"recompute": "full", "recompute_num_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout, stage", [((1, 1, 1), 0), ((1, 2, 2), 3), ((2, 2, 1), 0)], ids=str)
def test_recomputation_changes_no_bit(layout: Layout, stage: int, changes: dict[str, Any], run: Run) -> None:
    """Dropout included."""
    bitwise(run(layout, zero_stage=stage, **DROPOUT, **changes), run(layout, zero_stage=stage, **DROPOUT))


def test_all_of_them_together(run: Run) -> None:
    changes = {"sequence_parallel": True, "zero_stage": 2}
    bitwise(run((2, 1, 2), recompute="full", **changes, **DROPOUT), run((2, 1, 2), **changes, **DROPOUT))
