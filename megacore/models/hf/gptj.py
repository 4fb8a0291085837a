"""GPT-J: attention and feed-forward layer side by side after one norm, rotary positions on a part of each head, biases
in the feed-forward layer and the output layer.

It rotates pairs of neighbouring dimensions, and megacore dimension i with i + r/2: the rows that make the rotated part
of queries and keys are stored in another order.
"""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import (
    ACTIVATIONS,
    Family,
    Same,
    TensorRule,
    neighbouring_q_k_v,
    read_tied,
    write_activation,
    write_tied,
)

_BLOCK = "transformer.h.{i}"


def _read(reader: ConfigReader) -> dict[str, Any]:
    hidden, heads, rotated = (reader.get(*one) for one in (("n_embd", 4096), ("n_head", 16), ("rotary_dim", 64)))
    dropout = reader.get("resid_pdrop", 0.0)
    fields: dict[str, Any] = {
        "hidden_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
        "activation": reader.activation("activation_function", ACTIVATIONS, "gelu_new"),
    }
    if all(type(one) is int and one > 0 for one in (hidden, heads, rotated)) and rotated <= hidden // heads:
        fields["rotary_percent"] = rotated / (hidden // heads)
    else:
        reader.problem("rotary_dim", f"is {str(rotated)[:40]!r}, not a number of dimensions of a head")
    return fields | read_tied(reader, default=False)


def _write(config: ResolvedModel) -> dict[str, Any]:
    return {
        "rotary_dim": config.rotary_dimensions,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "activation_function": write_activation(config),
    } | write_tied(config)


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    prefix="transformer.",
    same=(
        Same("num_layers", ("n_layer", "num_hidden_layers"), 28),
        Same("hidden_size", ("n_embd", "hidden_size"), 4096),
        Same("num_attention_heads", ("n_head", "num_attention_heads"), 16),
        Same("ffn_hidden_size", ("n_inner",), None),
        Same("max_position_embeddings", ("n_positions", "max_position_embeddings", "n_ctx"), 2048),
        Same("vocab_size", ("vocab_size",), 50400),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("attention_dropout", ("attn_pdrop",), 0.0),
    ),
    optional={"rotary": (True,), "scale_attn_weights": (True,)},  # which transformers does not look at
    constants={
        "position_embedding_type": "rope",
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "disable_bias_linear": True,
        "add_mlp_bias": True,
        "add_output_layer_bias": True,
    },
    ignored=frozenset(
        (
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "summary_first_dropout",
        )
    ),
    read=_read,
    write=_write,
    rules=(
        TensorRule("embedding.tokens.weight", ("transformer.wte.weight",)),
        *_both("blocks.{i}.attention_norm", f"{_BLOCK}.ln_1"),
        TensorRule(
            "blocks.{i}.attention.qkv.weight",
            tuple(f"{_BLOCK}.attn.{one}_proj.weight" for one in "qkv"),
            neighbouring_q_k_v,
        ),
        TensorRule("blocks.{i}.attention.output.weight", (f"{_BLOCK}.attn.out_proj.weight",)),
        *_both("blocks.{i}.mlp.up", f"{_BLOCK}.mlp.fc_in"),
        *_both("blocks.{i}.mlp.down", f"{_BLOCK}.mlp.fc_out"),
        *_both("head.norm", "transformer.ln_f"),
        *_both("head", "lm_head"),
    ),
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
    ties={"lm_head.weight": "transformer.wte.weight"},
)
