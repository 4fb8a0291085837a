"""--reproducible: with the same micro-batch size, not a bit of losses, norms, gradients or weights depends on tp, pp,
dp or the ZeRO stage; nor on anything else that is promised to change no bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.parity.runs import Layout, Run, Size, agree, bitwise, in_both_sizes, small

PLAIN: dict[str, Any] = {"reproducible": True, "micro_batch_size": 1}


def plain(layout: Layout, size: Size) -> dict[str, Any]:
    """What both runs have in common: two steps of the small model, six of the whole one."""
    return {**PLAIN, **size(layout), "train_iters": 2 if size is small else 6}


@in_both_sizes
@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 2, 1), {}),
        pytest.param((1, 3, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 4, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), {"zero_stage": 0}, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), {"zero_stage": 1}, marks=pytest.mark.slow),
        ((1, 1, 2), {"zero_stage": 2}),
        pytest.param((1, 1, 2), {"zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param((1, 1, 4), {"zero_stage": 0}, marks=pytest.mark.slow),
        ((1, 1, 4), {"zero_stage": 2, "bucket_size_mb": 1e-6}),
        ((1, 1, 4), {"zero_stage": 3, "recompute": "full"}),
        ((1, 2, 2), {"zero_stage": 1, "overlap_grad_reduce": False, "overlap_param_gather": False}),
        pytest.param((1, 2, 2), {"zero_stage": 2, "bucket_size_mb": 100.0}, marks=pytest.mark.slow),
        ((1, 3, 2), {"zero_stage": 3, "recompute": "selective"}),
        pytest.param((1, 2, 4), {"zero_stage": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_layout_changes_a_bit(layout: Layout, changes: dict[str, Any], size: Size, run: Run) -> None:
    bitwise(run(layout, **plain(layout, size), **changes), run((1, 1, 1), **plain(layout, size)))


@in_both_sizes
@pytest.mark.parametrize(
    "stage, layout, sequence_parallel",
    [
        (0, (2, 2, 2), False),
        (3, (2, 1, 2), True),
        pytest.param(0, (2, 2, 2), True, marks=pytest.mark.slow),
        pytest.param(3, (2, 1, 2), False, marks=pytest.mark.slow),
        pytest.param(1, (2, 3, 1), False, marks=pytest.mark.slow),
        pytest.param(1, (2, 3, 1), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nor_with_tensor_parallelism(stage: int, layout: Layout, sequence_parallel: bool, size: Size, run: Run) -> None:
    changes = plain(layout, size)
    if size is small:  # each microbatch costs tens of messages between ranks
        changes["global_batch_size"] = 4
    bitwise(run(layout, zero_stage=stage, sequence_parallel=sequence_parallel, **changes), run((1, 1, 1), **changes))


LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
ONE_GROUP: dict[str, Any] = LLAMA | {"num_query_groups": 1, "qk_layernorm": True}
LOSS: dict[str, Any] = {"recompute": "light", "label_smoothing": 0.1, "z_loss": 0.01}
# Three of several features each; in `make test-slow` the features one by one too.
TOGETHER: list[dict[str, Any]] = [
    {"precision": "fp16", "position_embedding_type": "alibi", "embedding_layernorm": True},
    LLAMA | {"num_query_groups": 2, "precision": "bf16", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    ONE_GROUP | LOSS | {"num_attention_heads": 8, "window_size": 5},
]
APART: list[dict[str, Any]] = [
    LLAMA | {"num_query_groups": 2},
    ONE_GROUP,
    {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    {"precision": "bf16"},
    LOSS,
    {"num_attention_heads": 8, "window_size": 5},
]
WAYS = [*TOGETHER, *(pytest.param(way, marks=pytest.mark.slow) for way in APART)]


@in_both_sizes
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_nor_with_more_ranks_than_heads_that_share_keys(
    changes: dict[str, Any], sequence_parallel: bool, size: Size, run: Run
) -> None:
    changes = plain((4, 1, 1), size) | changes | {"global_batch_size": 4}
    bitwise(run((4, 1, 1), sequence_parallel=sequence_parallel, **changes), run((1, 1, 1), **changes))


def test_nor_with_one_block_of_positions_on_each_rank(run: Run) -> None:
    """Gradients of a block of positions are contiguous here, and parts of a longer tensor in one process."""
    changes = plain((4, 1, 1), small) | {"micro_batch_size": 2, "global_batch_size": 4}
    bitwise(run((4, 1, 1), sequence_parallel=True, **changes), run((1, 1, 1), **changes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_nor_in_a_random_combination(seed: int, run: Run) -> None:
    draw = random.Random(f"reproducible {seed}")
    heads = draw.choice([4, 8])
    model = draw.choice([{}, LLAMA | {"num_query_groups": draw.choice([1, 2, 4])}])
    dropout = draw.choice([0.0, 0.1])
    both: dict[str, Any] = model | {
        "num_attention_heads": heads,
        "hidden_size": 64,
        "num_layers": 4,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "precision": draw.choice(["fp32", "fp32", "bf16", "fp16"]),
        "recompute": draw.choice(["none", "selective", "light", "full"]),
        "micro_batch_size": draw.choice([1, 2]),
        "global_batch_size": 8,
        "train_iters": 3,
        "reproducible": True,
        "qk_layernorm": bool(model) and draw.random() < 0.5,
    }
    tp = draw.choice([2, 4, 8] if heads == 8 else [2, 4])
    pp, dp = draw.choice(
        [(1, 1), (1, 2), (2, 1), (2, 2)] if tp == 2 else [(1, 1), (1, 2), (2, 1)] if tp == 4 else [(1, 1)]
    )
    layout = {
        "sequence_parallel": draw.random() < 0.5,
        "zero_stage": draw.choice([0, 1, 2, 3]),
        "schedule": draw.choice(["gpipe", "1f1b", "zero-bubble"]),
    }
    bitwise(run((tp, pp, dp), **both, **layout), run((1, 1, 1), **both))


MODES: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"untie_embeddings_and_output_weights": True, "optimizer": "sgd", "lr": 0.1},
    {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    {"micro_batch_size": 2},
]
# Each mode on one of the two layouts, in turn; in `make test-slow` on the other one too.
IN_TURN = [
    pytest.param(stage, layout, mode, marks=[pytest.mark.slow] if (number + turn) % 2 else [])
    for number, mode in enumerate(MODES)
    for turn, (stage, layout) in enumerate([(1, (1, 2, 2)), (3, (1, 1, 4))])
]


@in_both_sizes
@pytest.mark.parametrize("stage, layout, changes", IN_TURN, ids=str)
def test_nor_in_any_other_mode(stage: int, layout: Layout, changes: dict[str, Any], size: Size, run: Run) -> None:
    changes = plain(layout, size) | changes
    bitwise(run(layout, zero_stage=stage, **changes), run((1, 1, 1), **changes))


@in_both_sizes
def test_it_is_the_ordinary_run_to_rounding(size: Size, run: Run) -> None:
    exact = plain((2, 1, 1), size)
    ordinary = {name: value for name, value in exact.items() if name != "reproducible"}
    agree(run((1, 1, 1), **exact), run((1, 1, 1), **ordinary))
    agree(run((2, 1, 1), **exact), run((1, 1, 1), **ordinary))
    agree(run((2, 1, 1), **exact, reproducible_blocks=1), run((1, 1, 1), **ordinary))


def test_another_number_of_blocks_is_another_rounding(run: Run) -> None:
    changes = plain((1, 1, 1), small)
    one, two = run((1, 1, 1), **changes, reproducible_blocks=1), run((1, 1, 1), **changes, reproducible_blocks=2)
    assert any(not torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)
    agree(one, two)
