"""Falcon: rotary positions, and attention and feed-forward layer side by side after one norm (7B, 11B) or two (40B,
180B). Query, key and value are fused by group, as megacore has them."""

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

_LAYER = "transformer.h.{i}"


def _read(reader: ConfigReader) -> dict[str, Any]:
    positions, heads = reader.get("max_position_embeddings", 2048), reader.get("num_attention_heads", 71)
    flags = {
        name: reader.get(name, default)
        for name, default in (
            *(("new_decoder_architecture", False), ("multi_query", True), ("parallel_attn", True)),
            *(("bias", False), ("alibi", False)),
        )
    }
    for name, value in flags.items():
        if type(value) is not bool:
            reader.problem(name, f"is {str(value)[:20]!r}, not true or false")
    if flags["alibi"] is True:
        reader.problem(
            "alibi", "is true: transformers rounds this family's ALiBi to bf16 and divides it, which megacore does not"
        )
    newer = flags["new_decoder_architecture"] is True
    if newer:
        reader.only("parallel_attn", (True,), True)
    groups = reader.get("num_kv_heads")
    groups = heads if groups is None else groups
    if not newer:
        groups = 1 if flags["multi_query"] else heads
    norms = reader.get("num_ln_in_parallel_attn")
    norms = norms if norms is not None else 2 if newer else 1
    if type(groups) is not int or norms not in (1, 2):
        reader.problem("num_kv_heads", "or num_ln_in_parallel_attn is not a valid number")
        groups = None
    parallel = newer or flags["parallel_attn"] is True
    return (
        read_rope(reader, positions if type(positions) is int else 1)
        | read_tied(reader, default=True)
        | {
            "num_query_groups": groups,
            "parallel_residual": parallel,
            "shared_parallel_norm": parallel and (not newer or norms == 1),
            "disable_bias_linear": flags["bias"] is False,
            "activation": reader.activation("activation", ACTIVATIONS, "gelu"),
        }
    )


def _write(config: ResolvedModel) -> dict[str, Any]:
    newer = _is_newer(config)
    return (
        write_rope(config)
        | write_tied(config)
        | {
            "new_decoder_architecture": newer,
            "num_ln_in_parallel_attn": (1 if config.shared_parallel_norm else 2) if newer else None,
            "multi_query": not newer and config.query_groups == 1,
            "num_kv_heads": config.query_groups if newer else None,
            "parallel_attn": config.parallel_residual,
            "bias": not config.disable_bias_linear,
            "activation": write_activation(config),
        }
    )


def _is_newer(config: ResolvedModel) -> bool:
    """Whether a model needs the decoder architecture of Falcon 40B."""
    few_groups = config.query_groups not in (1, config.num_attention_heads)
    return config.parallel_residual and (few_groups or not config.shared_parallel_norm)


def _both(ours: str, theirs: str, instead: str | None = None) -> tuple[TensorRule, ...]:
    """Weight and bias of a layer of a block.

    Args:
        ours: megacore's name.
        theirs: the family's.
        instead: its name where a parallel block has two norms; None: the same.
    """
    return tuple(
        TensorRule(
            f"blocks.{{i}}.{ours}.{kind}",
            (f"{_LAYER}.{theirs}.{kind}",),
            instead=None if instead is None else (f"{_LAYER}.{instead}.{kind}",),
            when=lambda config: config.parallel_residual and not config.shared_parallel_norm,
        )
        for kind in ("weight", "bias")
    )


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    same=(
        Same("num_layers", ("num_hidden_layers", "n_layer"), 32),
        Same("hidden_size", ("hidden_size", "n_embed"), 4544),
        Same("num_attention_heads", ("num_attention_heads", "n_head"), 71),
        Same("ffn_hidden_size", ("ffn_hidden_size",), None),
        Same("max_position_embeddings", ("max_position_embeddings",), 2048),
        Same("vocab_size", ("vocab_size",), 65024),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("hidden_dropout", ("hidden_dropout",), 0.0),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    ),
    optional={"apply_residual_connection_post_layernorm": (False,)},
    read=_read,
    write=_write,
    rules=(
        TensorRule("embedding.tokens.weight", ("transformer.word_embeddings.weight",)),
        *_both("attention_norm", "input_layernorm", "ln_attn"),
        *_both("attention.qkv", "self_attention.query_key_value"),
        *_both("attention.output", "self_attention.dense"),
        *_both("mlp_norm", "post_attention_layernorm", "ln_mlp"),
        *_both("mlp.up", "mlp.dense_h_to_4h"),
        *_both("mlp.down", "mlp.dense_4h_to_h"),
        TensorRule("head.norm.weight", ("transformer.ln_f.weight",)),
        TensorRule("head.norm.bias", ("transformer.ln_f.bias",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    buffers=(".rotary.inv_freq", ".maybe_rotary.inv_freq"),
    ties={"lm_head.weight": "transformer.word_embeddings.weight"},
)
