"""GPT-2: Conv1D matrices, stored as [in, out], and query, key and value stacked."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import (
    ACTIVATIONS,
    Family,
    Layout,
    Same,
    TensorRule,
    read_tied,
    stacked_q_k_v,
    write_activation,
    write_tied,
)

_IGNORED = """
    reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout
"""


def _read(reader: ConfigReader) -> dict[str, Any]:
    dropout = reader.get("resid_pdrop", 0.1)  # megacore has one for all; those of transformers may differ
    return {
        "hidden_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
        "activation": reader.activation("activation_function", ACTIVATIONS, "gelu_new"),
    } | read_tied(reader, default=True)


def _write(config: ResolvedModel) -> dict[str, Any]:
    return {
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "activation_function": write_activation(config),
    } | write_tied(config)


def _both(ours: str, theirs: str, *, layout: Layout | None = None, transposed: bool = True) -> tuple[TensorRule, ...]:
    """Weight and bias of a layer of a block."""
    ours, theirs = f"blocks.{{i}}.{ours}", f"transformer.h.{{i}}.{theirs}"
    return (
        TensorRule(f"{ours}.weight", (f"{theirs}.weight",), layout, transposed),
        TensorRule(f"{ours}.bias", (f"{theirs}.bias",), layout),
    )


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    same=(
        Same("num_layers", ("n_layer", "num_hidden_layers"), 12),
        Same("hidden_size", ("n_embd", "hidden_size"), 768),
        Same("num_attention_heads", ("n_head", "num_attention_heads"), 12),
        Same("ffn_hidden_size", ("n_inner",), None),
        Same("max_position_embeddings", ("n_positions", "max_position_embeddings", "n_ctx"), 1024),
        Same("vocab_size", ("vocab_size",), 50257),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("attention_dropout", ("attn_pdrop",), 0.1),
    ),
    fixed={
        "scale_attn_weights": ((True,), True),
        "scale_attn_by_inverse_layer_idx": ((False,), False),
    },
    ignored=frozenset(_IGNORED.split()),
    read=_read,
    write=_write,
    rules=(
        TensorRule("embedding.tokens.weight", ("transformer.wte.weight",)),
        TensorRule("embedding.positions", ("transformer.wpe.weight",)),
        *_both("attention_norm", "ln_1", transposed=False),
        *_both("attention.qkv", "attn.c_attn", layout=stacked_q_k_v),
        *_both("attention.output", "attn.c_proj"),
        *_both("mlp_norm", "ln_2", transposed=False),
        *_both("mlp.up", "mlp.c_fc"),
        *_both("mlp.down", "mlp.c_proj"),
        TensorRule("head.norm.weight", ("transformer.ln_f.weight",)),
        TensorRule("head.norm.bias", ("transformer.ln_f.bias",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
    ties={"lm_head.weight": "transformer.wte.weight"},
)
