"""--reproducible: with the same micro-batch size, not a bit of losses, norms, gradients or weights depends on pp, dp or
the ZeRO stage; nor on anything else that is promised to change no bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.runs import Layout, Run, agree, bitwise

PLAIN: dict[str, Any] = {"reproducible": True, "micro_batch_size": 1, "train_iters": 6}


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 2, 1), {}),
        ((1, 3, 1), {}),
        ((1, 4, 1), {}),
        ((1, 1, 2), {"zero_stage": 0}),
        ((1, 1, 2), {"zero_stage": 1}),
        ((1, 1, 2), {"zero_stage": 2}),
        ((1, 1, 2), {"zero_stage": 3}),
        ((1, 1, 4), {"zero_stage": 0}),
        ((1, 1, 4), {"zero_stage": 2, "bucket_size_mb": 1e-6}),
        ((1, 1, 4), {"zero_stage": 3, "recompute": "full"}),
        ((1, 2, 2), {"zero_stage": 1, "overlap_grad_reduce": False, "overlap_param_gather": False}),
        ((1, 2, 2), {"zero_stage": 2, "bucket_size_mb": 100.0}),
        ((1, 3, 2), {"zero_stage": 3, "recompute": "selective"}),
        ((1, 2, 4), {"zero_stage": 0}),
    ],
    ids=str,
)
def test_no_layout_changes_a_bit(layout: Layout, changes: dict[str, Any], run: Run) -> None:
    bitwise(run(layout, **PLAIN, **changes), run((1, 1, 1), **PLAIN))


@pytest.mark.parametrize("stage, layout", [(0, (2, 2, 2)), (3, (2, 1, 2)), (1, (2, 3, 1))], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_nor_beside_tensor_parallelism(stage: int, layout: Layout, sequence_parallel: bool, run: Run) -> None:
    changes = {**PLAIN, "sequence_parallel": sequence_parallel}
    bitwise(run(layout, zero_stage=stage, **changes), run((2, 1, 1), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"untie_embeddings_and_output_weights": True, "optimizer": "sgd", "lr": 0.1},
        {"hidden_dropout": 0.2, "attention_dropout": 0.2},
        {"micro_batch_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("stage, layout", [(1, (1, 2, 2)), (3, (1, 1, 4))], ids=str)
def test_nor_in_any_other_mode(stage: int, layout: Layout, changes: dict[str, Any], run: Run) -> None:
    changes = PLAIN | changes
    bitwise(run(layout, zero_stage=stage, **changes), run((1, 1, 1), **changes))


def test_it_is_the_ordinary_run_to_rounding(run: Run) -> None:
    plain = {name: value for name, value in PLAIN.items() if name != "reproducible"}
    agree(run((1, 1, 1), **PLAIN), run((1, 1, 1), **plain))
    agree(run((2, 1, 1), **PLAIN), run((1, 1, 1), **plain))
