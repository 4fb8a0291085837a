"""GPT-NeoX and Pythia: rotary positions on a share of each head, attention and MLP side by side, and query, key and
value fused by head, as megacore has them."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import (
    ACTIVATIONS,
    Family,
    Same,
    TensorRule,
    read_tied,
    write_activation,
    write_tied,
)
from megacore.models.hf.rope import read_rope, write_rope


def _read(reader: ConfigReader) -> dict[str, Any]:
    positions, share = reader.get("max_position_embeddings", 2048), reader.get("rotary_pct", 0.25)
    parallel = reader.get("use_parallel_residual", True)
    if type(parallel) is not bool:
        reader.problem("use_parallel_residual", f"is {parallel!r}, not true or false")
    fields = read_rope(reader, positions if type(positions) is int else 1, base="rotary_emb_base", share=share)
    return (
        fields
        | read_tied(reader, default=False)
        | {"parallel_residual": parallel, "activation": reader.activation("hidden_act", ACTIVATIONS, "gelu")}
    )


def _write(config: ResolvedModel) -> dict[str, Any]:
    return (
        write_rope(config, share=True)
        | write_tied(config)
        | {"use_parallel_residual": config.parallel_residual, "hidden_act": write_activation(config)}
    )


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    ours, theirs = f"blocks.{{i}}.{ours}", f"gpt_neox.layers.{{i}}.{theirs}"
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    same=(
        Same("num_layers", ("num_hidden_layers",), 44),
        Same("hidden_size", ("hidden_size",), 6144),
        Same("num_attention_heads", ("num_attention_heads",), 64),
        Same("ffn_hidden_size", ("intermediate_size",), 24576),
        Same("max_position_embeddings", ("max_position_embeddings",), 2048),
        Same("vocab_size", ("vocab_size",), 50432),
        Same("norm_epsilon", ("layer_norm_eps",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("hidden_dropout", ("hidden_dropout",), 0.0),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    ),
    fixed={"attention_bias": ((True,), True)},
    read=_read,
    write=_write,
    rules=(
        TensorRule("embedding.tokens.weight", ("gpt_neox.embed_in.weight",)),
        *_both("attention_norm", "input_layernorm"),
        *_both("attention.qkv", "attention.query_key_value"),
        *_both("attention.output", "attention.dense"),
        *_both("mlp_norm", "post_attention_layernorm"),
        *_both("mlp.up", "mlp.dense_h_to_4h"),
        *_both("mlp.down", "mlp.dense_4h_to_h"),
        TensorRule("head.norm.weight", ("gpt_neox.final_layer_norm.weight",)),
        TensorRule("head.norm.bias", ("gpt_neox.final_layer_norm.bias",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    aliases={"embed_out.weight": "lm_head.weight"},
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ties={"lm_head.weight": "gpt_neox.embed_in.weight"},
)
