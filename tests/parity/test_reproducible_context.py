"""--reproducible over context parallelism, and over tensor parallelism of experts, latent attention and norms of all
heads: each layout has the bits of one process."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.parity.runs import Run, bitwise
from tests.parity.test_experts import MODEL as EXPERTS
from tests.parity.test_experts import MODELS
from tests.parity.test_latent_attention import LATENT
from tests.parity.test_reproducible import LLAMA

SMALL: dict[str, Any] = {
    "reproducible": True,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "num_layers": 2,
    "train_iters": 2,
    "lr_warmup_iters": 2,
}
SHARED_KEYS = LLAMA | {"num_query_groups": 2}
WIDE: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 64}
SIGMOID: dict[str, Any] = MODELS["sigmoid"] | {"moe_shared_expert_size": 16}
PACKED: dict[str, Any] = {"reset_attention_mask": True, "reset_position_ids": True}
CONTEXT: list[tuple[dict[str, Any], tuple[int, int, int], dict[str, Any]]] = [
    ({}, (1, 1, 1), {"cp": 2}),
    (SHARED_KEYS | PACKED, (2, 1, 1), {"cp": 2, "sequence_parallel": True, "zero_stage": 3}),
]
MORE_CONTEXT: list[tuple[dict[str, Any], tuple[int, int, int], dict[str, Any]]] = [
    ({"hidden_dropout": 0.1, "attention_dropout": 0.1}, (2, 1, 1), {"cp": 2}),
    (WIDE | LLAMA | {"num_query_groups": 2}, (1, 1, 1), {"cp": 4}),
    (WIDE, (2, 1, 1), {"cp": 4}),
    (WIDE | {"precision": "bf16"}, (2, 1, 1), {"cp": 4, "sequence_parallel": True}),
    (WIDE | {"precision": "fp16", "hidden_dropout": 0.1}, (1, 1, 2), {"cp": 4, "zero_stage": 2}),
    (SHARED_KEYS | {"precision": "bf16", "qk_layernorm": True}, (1, 2, 1), {"cp": 2, "schedule": "zero-bubble"}),
    (PACKED, (1, 2, 1), {"cp": 2, "schedule": "gpipe", "recompute": "full"}),
    (LLAMA | {"num_query_groups": 1}, (2, 2, 1), {"cp": 2, "sequence_parallel": True, "recompute": "selective"}),
    ({"position_embedding_type": "alibi", "embedding_layernorm": True}, (1, 1, 2), {"cp": 2, "zero_stage": 1}),
    ({"window_size": 5, "label_smoothing": 0.1, "z_loss": 0.01}, (2, 1, 1), {"cp": 2, "recompute": "light"}),
    ({"attention": "fused-softmax", "micro_batch_size": 2}, (1, 1, 1), {"cp": 2}),
]


@pytest.mark.parametrize(
    "model, layout, changes",
    [*CONTEXT, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CONTEXT)],
    ids=str,
)
def test_no_context_parallelism_changes_a_bit(
    model: dict[str, Any], layout: tuple[int, int, int], changes: dict[str, Any], run: Run
) -> None:
    bitwise(run(layout, **(SMALL | model | changes)), run((1, 1, 1), **(SMALL | model)))


BERT: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "lr_warmup_iters"}


@pytest.mark.slow
@pytest.mark.parametrize("style", ["classic", "modern"])
@pytest.mark.parametrize("tp, changes", [(1, {"cp": 2}), (2, {"cp": 2, "sequence_parallel": True, "zero_stage": 2})])
def test_nor_of_bert(tp: int, changes: dict[str, Any], style: str, run_bert: Run) -> None:
    both = BERT | {"bert_style": style, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    bitwise(run_bert((tp, 1, 1), **(both | changes)), run_bert((1, 1, 1), **both))


JOINT = LLAMA | {"qk_layernorm": True, "qk_layernorm_all_heads": True}
EACH = LLAMA | {"qk_layernorm": True, "qk_layernorm_per_head": True, "num_query_groups": 1}
LAYERS: list[tuple[dict[str, Any], tuple[int, int, int], dict[str, Any]]] = [
    (EXPERTS | SIGMOID, (2, 1, 1), {"sequence_parallel": True}),
    (EXPERTS | {"activation": "gelu"}, (4, 1, 1), {}),
]
MORE_LAYERS: list[tuple[dict[str, Any], tuple[int, int, int], dict[str, Any]]] = [
    *(
        (EXPERTS | MODELS[model] | {"precision": precision}, layout, changes)
        for model, precision in (("softmax", "fp32"), ("limited", "bf16"), ("groups", "fp32"), ("bias", "fp16"))
        for layout, changes in (
            ((4, 1, 1), {"sequence_parallel": True}),
            ((2, 1, 2), {"ep": 2, "zero_stage": 1}),
            ((2, 1, 2), {"ep": 2, "sequence_parallel": True, "recompute": "full"}),
            ((2, 2, 1), {"schedule": "zero-bubble"}),
            ((2, 1, 1), {"cp": 2}),
        )
    ),
    (EXPERTS | SIGMOID, (1, 1, 1), {"cp": 2}),
    (EXPERTS | SIGMOID, (2, 1, 1), {"cp": 2, "sequence_parallel": True, "zero_stage": 2}),
    (LATENT, (2, 1, 1), {}),
    (LATENT, (4, 1, 1), {"sequence_parallel": True, "recompute": "selective"}),
    (LATENT | {"precision": "bf16"}, (2, 1, 1), {"cp": 2, "sequence_parallel": True}),
    (LATENT | {"q_lora_rank": None, "v_head_dim": 14, "qk_layernorm": False}, (2, 2, 1), {"schedule": "zero-bubble"}),
    (JOINT, (2, 1, 1), {}),
    (JOINT, (4, 1, 1), {"sequence_parallel": True}),
    (EACH, (2, 1, 1), {"cp": 2}),
    (EACH, (4, 1, 1), {"sequence_parallel": True}),
    (EACH | {"normalization": "LayerNorm", "precision": "bf16"}, (2, 1, 1), {"cp": 2, "sequence_parallel": True}),
    (JOINT | {"normalization": "LayerNorm", "precision": "bf16"}, (2, 1, 1), {"cp": 2}),
]


@pytest.mark.parametrize(
    "model, layout, changes",
    [*LAYERS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_LAYERS)],
    ids=str,
)
def test_nor_does_any_layout_of_other_layers(
    model: dict[str, Any], layout: tuple[int, int, int], changes: dict[str, Any], run: Run
) -> None:
    both = model | SMALL
    bitwise(run(layout, **(both | changes)), run((1, 1, 1), **both))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_nor_does_a_random_combination(seed: int, run: Run) -> None:
    draw = random.Random(f"context and experts {seed}")
    heads = draw.choice([4, 8])
    dropout = draw.choice([0.0, 0.1])
    model = draw.choice(
        [
            {},
            LLAMA | {"num_query_groups": draw.choice([1, 2, 4]), "qk_layernorm": draw.random() < 0.5},
            EXPERTS | draw.choice([SIGMOID, *(MODELS[name] for name in ("softmax", "limited", "bias"))]),
            LATENT,
        ]
    )
    both = model | {
        "num_attention_heads": heads,
        "hidden_size": 64,
        "num_layers": 3,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "precision": draw.choice(["fp32", "fp32", "bf16", "fp16"]),
        "micro_batch_size": draw.choice([1, 2]),
        "global_batch_size": 8,
        "train_iters": 2,
        "lr_warmup_iters": 2,
        "reproducible": True,
        **draw.choice([{}, PACKED]),
    }
    if both["precision"] == "fp16":  # so that no step is skipped
        both["initial_loss_scale"] = 1024.0
    tp, pp, dp, cp = draw.choice(
        [(1, 1, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1), (1, 1, 2, 2), (1, 2, 1, 2), (4, 1, 1, 1), (2, 1, 2, 1)]
        + ([(1, 1, 1, 4)] if heads == 8 else [])
    )
    layout = {
        "cp": cp,
        "ep": 2 if "num_experts" in both and dp == 2 and cp == 1 else 1,
        "sequence_parallel": tp > 1 and draw.random() < 0.5,
        "zero_stage": draw.choice([0, 1, 2, 3]),
        "schedule": draw.choice(["gpipe", "1f1b", "zero-bubble"]),
        "recompute": draw.choice(["none", "selective", "full"]),
    }
    bitwise(run((tp, pp, dp), **(both | layout)), run((1, 1, 1), **both))
