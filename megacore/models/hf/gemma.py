"""Gemma, Gemma 2 and Gemma 3 (text): scaled embeddings, norms that multiply by 1 + weight, GeGLU; from Gemma 2 on with
norms of the outputs of its layers and windows in some layers, Gemma 2 with soft caps, Gemma 3 with norms of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WINDOW, repeated
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Same, read_tied, write_tied
from megacore.models.hf.kinds_of_layers import pattern_fields, read_layer_types, write_layer_types
from megacore.models.hf.llama import block_rules, read_common, same_fields, window_of
from megacore.models.hf.rope import read_rope, read_ropes_of_kinds, rotation_of, write_rope, write_ropes_of_kinds

_CONSTANTS: Mapping[str, Any] = {
    "activation": "geglu",
    "normalization": "RMSNorm",
    "layernorm_1p": True,
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
}
_ACTIVATION = (("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
_CAUSAL = ((None, False), None)
_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
_FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _embedding(reader: ConfigReader, default: int) -> dict[str, Any]:
    """Embeddings are scaled by the square root of the hidden size."""
    hidden = reader.get("hidden_size", default)
    return {"embedding_multiplier": math.sqrt(hidden) if type(hidden) is int and hidden > 0 else 1.0}


def _read_gemma(reader: ConfigReader) -> dict[str, Any]:
    reader.only("layer_types", (None,))
    return read_common(reader, tied=True) | _embedding(reader, 3072)


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    prefix="model.",
    same=same_fields(
        groups=16, positions=8192, inner=24576, vocabulary=256000, head=256, layers=28, hidden=3072, heads=16
    ),
    fixed={"hidden_act": _ACTIVATION, "attention_bias": ((False,), False), "use_bidirectional_attention": _CAUSAL},
    optional={"hidden_activation": (None, "gelu_pytorch_tanh")},
    constants=_CONSTANTS,
    read=_read_gemma,
    write=lambda config: write_rope(config) | write_tied(config),
    rules=block_rules(),
    buffers=(".rotary_emb.inv_freq",),
    ties=_TIES,
)


# ---- Gemma 2 and 3 ---------------------------------------------------------------------------------------------------


def _read_later(reader: ConfigReader, period: Any) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common: windows, and what scores are multiplied by.

    Args:
        reader: the file.
        period: of which each last layer has no window, where the file has no `layer_types`.
    """
    layers, window = reader.get("num_hidden_layers", 26), window_of(reader, default=4096)
    kinds = read_layer_types(reader, layers)
    if kinds is None and type(layers) is int and type(period) is int and 1 <= period <= layers + 1 <= 10_001:
        kinds = repeated(WINDOW * (period - 1) + FULL, layers)
    scalar = reader.get("query_pre_attn_scalar", 256)
    if type(scalar) not in (int, float) or scalar <= 0:
        reader.problem("query_pre_attn_scalar", f"is {str(scalar)[:40]!r}, not a positive number")
        scalar = 256
    fields = read_tied(reader, default=True) | _embedding(reader, 2304)
    return fields | pattern_fields(kinds or FULL, window) | {"attention_multiplier": scalar**-0.5}


def _write_later(config: ResolvedModel) -> dict[str, Any]:
    scalar = (config.attention_multiplier or 1.0) ** -2
    return write_tied(config) | {
        "layer_types": write_layer_types(config),
        "sliding_window": config.window_size or 4096,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
    }


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    prefix="model.",
    same=(
        *same_fields(
            groups=4, positions=8192, inner=9216, vocabulary=256000, head=256, layers=26, hidden=2304, heads=8
        ),
        Same("attn_logit_softcapping", ("attn_logit_softcapping",), 50.0),
        Same("final_logit_softcapping", ("final_logit_softcapping",), 30.0),
    ),
    fixed={
        "hidden_activation": _ACTIVATION,
        "attention_bias": ((False,), False),
        "use_bidirectional_attention": _CAUSAL,
    },
    optional={"hidden_act": ("gelu_pytorch_tanh",)},  # which transformers does not look at
    constants={**_CONSTANTS, "norm_placement": "both"},
    ignored=frozenset(("cache_implementation",)),
    read=lambda reader: read_common(reader, tied=True) | _read_later(reader, 2),
    write=lambda config: write_rope(config) | _write_later(config),
    rules=block_rules(norms=_FOUR_NORMS),
    buffers=(".rotary_emb.inv_freq",),
    ties=_TIES,
)


def _read_gemma3(reader: ConfigReader) -> dict[str, Any]:
    period = reader.get("sliding_window_pattern", reader.get("_sliding_window_pattern", 6))
    pattern = _read_later(reader, period)
    return rotation_of(*_read_two_ropes(reader), pattern)


def _read_two_ropes(reader: ConfigReader) -> tuple[dict[str, Any], float | None]:
    """The rotation of layers without a window, and the base of those with one."""
    table, given = reader.get("rope_parameters"), reader.get("max_position_embeddings", 131072)
    positions = given if type(given) is int else 1
    local = reader.get("rope_local_base_freq", 10_000.0)  # as older files have it
    if isinstance(table, dict) and "full_attention" in table:
        base = reader.get("rope_theta", 1_000_000.0)
        return read_ropes_of_kinds(reader, positions, base=base, window_base=local)
    fields = read_rope(reader, positions)
    fields.setdefault("rotary_base", 1_000_000.0)
    if not reader.has("rope_theta"):
        fields["rotary_base"] = 1_000_000.0
    if type(local) not in (int, float):
        reader.problem("rope_local_base_freq", f"is {str(local)[:40]!r}, not a number")
        return fields, None
    return fields, float(local)


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    prefix="model.",
    same=same_fields(
        groups=4, positions=131072, inner=9216, vocabulary=262208, head=256, layers=26, hidden=2304, heads=8
    ),
    fixed={
        "hidden_activation": _ACTIVATION,
        "attention_bias": ((False,), False),
        "final_logit_softcapping": ((None,), None),
        "attn_logit_softcapping": ((None,), None),
        "use_bidirectional_attention": _CAUSAL,
    },
    constants={**_CONSTANTS, "qk_layernorm": True, "norm_placement": "both"},
    ignored=frozenset(("cache_implementation", "_sliding_window_pattern", "sliding_window_pattern")),
    read=_read_gemma3,
    write=lambda config: _write_later(config) | write_ropes_of_kinds(config),
    rules=block_rules(head_norms=True, norms=_FOUR_NORMS),
    buffers=(".rotary_emb.inv_freq",),
    ties=_TIES,
)
