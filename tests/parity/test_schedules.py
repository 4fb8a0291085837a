"""Every schedule computes the same: bit for bit under --reproducible, and to fp32 rounding without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.runs import Layout, Run, agree, bitwise

EXACT: dict[str, Any] = {"reproducible": True, "micro_batch_size": 1, "train_iters": 2, "num_layers": 4}
TWICE = {"schedule": "interleaved", "virtual_stages": 2}
THRICE = {"schedule": "interleaved", "virtual_stages": 3, "num_layers": 6}
GPIPE, SPLIT = {"schedule": "gpipe"}, {"schedule": "zero-bubble"}


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 2, 1), GPIPE),
        ((1, 2, 1), TWICE),
        ((1, 2, 1), SPLIT),
        ((1, 2, 1), THRICE | {"untie_embeddings_and_output_weights": True}),
        ((1, 3, 1), TWICE | {"num_layers": 6}),
        ((1, 4, 1), SPLIT),
        pytest.param((1, 4, 1), GPIPE, marks=pytest.mark.slow),
        ((1, 2, 2), TWICE | {"zero_stage": 1}),
        pytest.param((1, 2, 2), THRICE | {"zero_stage": 2}, marks=pytest.mark.slow),
        ((1, 2, 2), TWICE | {"zero_stage": 3}),
        ((1, 2, 2), SPLIT | {"zero_stage": 1, "recompute": "full"}),
        ((1, 2, 2), SPLIT | {"zero_stage": 2, "recompute": "selective", "hidden_dropout": 0.1}),
        ((1, 2, 2), SPLIT | {"zero_stage": 3, "precision": "bf16"}),
        ((1, 3, 1), SPLIT | {"num_layers": 5, "pipeline_balance": "flops"}),
        ((1, 1, 1), SPLIT),
        ((1, 1, 1), SPLIT | {"recompute": "full", "hidden_dropout": 0.1}),
        ((1, 1, 2), SPLIT),
        ((1, 1, 2), SPLIT | {"zero_stage": 2}),
        ((1, 1, 2), SPLIT | {"zero_stage": 3}),
        ((1, 2, 1), TWICE | {"num_layers": 7, "pipeline_layout": "E,t|3*t|t|2*t,H"}),
    ],
    ids=str,
)
def test_no_schedule_changes_a_bit(layout: Layout, changes: dict[str, Any], run: Run) -> None:
    changes = EXACT | changes
    same = {name: changes[name] for name in changes.keys() & KEPT}
    bitwise(run(layout, **changes), run((1, 1, 1), **EXACT | same))


FEWER = {"global_batch_size": 4}
KEPT = {"num_layers", "precision", "hidden_dropout", "untie_embeddings_and_output_weights", "global_batch_size"}


@pytest.mark.parametrize(
    "changes, microbatches",
    [
        (TWICE, 1),
        (SPLIT, 1),
        (GPIPE, 3),
        (TWICE, 3),
        pytest.param(GPIPE, 1, marks=pytest.mark.slow),
        pytest.param(SPLIT, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nor_does_it_with_few_microbatches(changes: dict[str, Any], microbatches: int, run: Run) -> None:
    changes = EXACT | changes | {"global_batch_size": microbatches}
    bitwise(run((1, 2, 1), **changes), run((1, 1, 1), **EXACT, global_batch_size=microbatches))


@pytest.mark.parametrize(
    "sequence_parallel, changes",
    [
        (True, GPIPE),
        (False, TWICE),
        (True, SPLIT),
        pytest.param(False, GPIPE, marks=pytest.mark.slow),
        pytest.param(True, TWICE, marks=pytest.mark.slow),
        pytest.param(False, SPLIT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nor_does_it_beside_tensor_parallelism(changes: dict[str, Any], sequence_parallel: bool, run: Run) -> None:
    """Fewer microbatches: each costs tens of messages between ranks."""
    parallel = EXACT | FEWER | {"sequence_parallel": sequence_parallel}
    bitwise(run((2, 2, 1), **parallel | changes), run((2, 1, 1), **parallel))


@pytest.mark.slow  # eight processes
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("changes", [{}, GPIPE, TWICE, SPLIT], ids=str)
def test_nor_does_it_on_eight_ranks(changes: dict[str, Any], microbatches: int, run: Run) -> None:
    """Uneven stages: 18 blocks on 8 ranks, with embedding and head."""
    same = EXACT | {"num_layers": 18, "train_iters": 2, "global_batch_size": microbatches}
    bitwise(run((1, 8, 1), **same | changes), run((1, 1, 1), **same))


def test_nor_does_it_on_one_stage_beside_tensor_parallelism(run: Run) -> None:
    """Embedding and head are one parameter there, whose gradient no operator has alone."""
    bitwise(run((2, 1, 1), **EXACT | FEWER | SPLIT), run((2, 1, 1), **EXACT | FEWER))


@pytest.mark.parametrize(
    "plain",
    [
        pytest.param({"num_layers": 5, "train_iters": 3, "lr_warmup_iters": 2}, id="small"),
        pytest.param({"num_layers": 8}, id="whole", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "layout, changes",
    [
        pytest.param((2, 2, 2), TWICE | {"zero_stage": 2}, marks=pytest.mark.slow),
        ((1, 4, 1), SPLIT),
        ((1, 1, 1), SPLIT),
        ((2, 1, 2), SPLIT | {"zero_stage": 3}),
    ],
    ids=str,
)
def test_without_exact_sums_it_is_the_same_to_rounding(
    layout: Layout, changes: dict[str, Any], plain: dict[str, Any], run: Run
) -> None:
    agree(run(layout, **plain | changes), run((1, 1, 1), **plain))


def test_a_schedule_of_ones_own_computes_the_same(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two stages, four microbatches, backwards in another order, one of them in two halves."""
    path = tmp_path_factory.mktemp("schedule") / "mine.csv"
    path.write_text("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F3,1B3,1F2,1I2,1F1,1B1,1W2,1F0,1B0\n")
    changes = EXACT | {"global_batch_size": 4}
    bitwise(run((1, 2, 1), **changes, schedule_csv=str(path)), run((1, 1, 1), **changes))
