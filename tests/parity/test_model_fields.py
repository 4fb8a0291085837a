"""The fields that newer families bring, on layouts: tensor, pipeline, data, sequence and context parallelism against
one process, and recomputation and compilation against plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.runs import Layout, Outcome, agree, bitwise, train

_ROPE: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "num_query_groups": 2}
_FACTORS = "1.0,1.5,2.0,4.0"  # of heads of 8
MODELS: dict[str, dict[str, Any]] = {
    "gemma-3": {
        **_ROPE,
        "activation": "geglu",
        "disable_bias_linear": True,
        "layernorm_1p": True,
        "norm_placement": "both",
        "qk_layernorm": True,
        "embedding_multiplier": 5.5,
        "attention_multiplier": 0.3,
        "attention_pattern": "2*w,f",
        "window_size": 5,
        "window_rotary_base": 100.0,
    },
    "gemma-2": {
        **_ROPE,
        "activation": "geglu",
        "disable_bias_linear": True,
        "layernorm_1p": True,
        "norm_placement": "both",
        "attention_multiplier": 0.5,
        "attention_pattern": "w,f",
        "window_size": 5,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 1.5,
    },
    "granite": {
        **_ROPE,
        "activation": "swiglu",
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "residual_multiplier": 0.4,
        "logits_divisor": 3.0,
        "attention_pattern": "f,n",
    },
    "olmo": {
        **_ROPE,
        "normalization": "LayerNorm",
        "norm_affine": False,
        "clip_qkv": 0.02,
        "activation": "swiglu",
        "disable_bias_linear": True,
    },
    "olmo-2": {
        **_ROPE,
        "norm_placement": "after",
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "disable_bias_linear": True,
        "add_mlp_bias": True,
    },
    "gpt-j": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "add_output_layer_bias": True,
        "disable_bias_linear": True,
        "add_mlp_bias": True,
    },
    "opt": {"position_offset": 2, "activation": "relu", "add_output_layer_bias": True},
    "phi-longrope": {
        **_ROPE,
        "rope_scaling": "longrope",
        "rope_scaling_factor": 4.0,
        "rope_original_max_positions": 8,
        "rope_short_factors": _FACTORS,
        "rope_long_factors": "1.0,2.5,6.0,8.0",
    },
    "norms": {"layernorm_1p": True, "norm_placement": "both", "logits_divisor": 0.5, "window_size": 6},
}
SIZE = {"num_layers": 3, "train_iters": 2, "lr_warmup_iters": 1}


def outcome(layout: Layout, output: Path, model: str, **changes: Any) -> Outcome:
    given = {**SIZE, **MODELS[model], **changes}
    world = layout[0] * layout[1] * layout[2] * given.get("cp", 1)
    first: Outcome = run_distributed(train, world, layout, str(output), given)[0]
    return first


CASES: list[tuple[str, Layout, dict[str, Any]]] = [
    ("gemma-3", (2, 2, 1), {"sequence_parallel": True}),
    ("gemma-3", (1, 1, 2), {"cp": 2, "zero_stage": 2}),
    ("gemma-3", (4, 1, 1), {}),
    ("granite", (2, 1, 1), {"cp": 2, "zero_stage": 1, "loss_chunks": 3}),
    ("granite", (1, 2, 2), {"zero_stage": 3, "schedule": "zero-bubble"}),
    ("olmo", (2, 1, 1), {"sequence_parallel": True, "loss_chunks": 3}),
    ("olmo", (4, 2, 1), {"schedule": "zero-bubble"}),
    ("olmo", (1, 1, 2), {"zero_stage": 3, "qk_layernorm": True, "qk_layernorm_all_heads": True, "recompute": "light"}),
    ("olmo", (1, 2, 1), {"cp": 2, "normalization": "RMSNorm"}),
    ("olmo-2", (2, 1, 2), {"sequence_parallel": True, "zero_stage": 2}),
    ("olmo-2", (1, 3, 1), {"recompute": "full"}),
    ("norms", (2, 2, 1), {"recompute": "light"}),
    ("gemma-2", (2, 1, 1), {"cp": 2, "sequence_parallel": True}),
    ("gemma-2", (1, 1, 1), {"cp": 2, "cp_comm": "allgather", "loss_chunks": 3}),
    ("gemma-2", (1, 1, 1), {"cp": 2, "cp_comm": "ulysses"}),
    ("gemma-2", (1, 1, 1), {"cp": 4, "cp_comm": "ulysses", "num_query_groups": 2}),
    ("gemma-2", (2, 3, 1), {"loss_chunks": 2, "schedule": "zero-bubble"}),
    ("gemma-2", (1, 1, 2), {"zero_stage": 3, "recompute": "full", "attention_dropout": 0.2}),
    ("gpt-j", (2, 1, 1), {"cp": 2, "sequence_parallel": True}),
    ("gpt-j", (2, 3, 1), {"loss_chunks": 2, "schedule": "zero-bubble"}),
    ("gpt-j", (1, 2, 2), {"zero_stage": 3, "recompute": "light"}),
    ("opt", (2, 2, 1), {"sequence_parallel": True}),
    ("opt", (1, 1, 1), {"cp": 2}),
    ("phi-longrope", (2, 1, 1), {"cp": 2, "sequence_parallel": True}),
    ("phi-longrope", (1, 3, 1), {}),
]
# What changes numbers, and so is given to the run of one process too.
_NUMBERS = ("loss_chunks", "attention_dropout", "normalization", "qk_layernorm", "qk_layernorm_all_heads")
FEW = {0, 3, 5, 12}


@pytest.mark.parametrize(
    ("model", "layout", "changes"),
    [pytest.param(*case, marks=() if number in FEW else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=str,
)
def test_a_layout_equals_one_process(model: str, layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    kept = {name: value for name, value in changes.items() if name in _NUMBERS}
    agree(outcome(layout, tmp_path / "layout", model, **changes), outcome((1, 1, 1), tmp_path / "one", model, **kept))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma-2", "gpt-j", "olmo", "opt"])
@pytest.mark.parametrize(
    ("layout", "changes"), [((2, 1, 1), {"sequence_parallel": True}), ((1, 3, 1), {}), ((1, 1, 1), {"cp": 2})]
)
def test_reproducible_layouts_are_bitwise_the_same(
    model: str, layout: Layout, changes: dict[str, Any], tmp_path: Path
) -> None:
    one = outcome((1, 1, 1), tmp_path / "one", model, reproducible=True)
    bitwise(outcome(layout, tmp_path / "layout", model, reproducible=True, **changes), one)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", ["selective", "light", "full"])
def test_recomputation_changes_no_bit(model: str, recompute: str, tmp_path: Path) -> None:
    plain = outcome((1, 1, 1), tmp_path / "plain", model)
    bitwise(outcome((1, 1, 1), tmp_path / "again", model, recompute=recompute), plain)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_captured_code_computes_the_same(model: str, tmp_path: Path) -> None:
    plain = outcome((1, 1, 1), tmp_path / "plain", model)
    agree(outcome((1, 1, 1), tmp_path / "compiled", model, compile=True, compile_backend="aot-eager"), plain)
