"""Llama 2 and 3, Mistral, Qwen2 and Qwen3: one kind of block, which differ in biases, windows and norms of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WINDOW
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Layout, Same, TensorRule, q_k_v, read_tied, write_tied
from megacore.models.hf.kinds_of_layers import pattern_fields, read_layer_types, write_layer_types
from megacore.models.hf.rope import read_rope, write_rope

_CONSTANTS = {"activation": "swiglu", "normalization": "RMSNorm", "hidden_dropout": 0.0}
_BLOCK, _THEIRS = "blocks.{i}", "model.layers.{i}"
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def same_fields(
    *,
    groups: int | None,
    positions: int,
    inner: int,
    vocabulary: int,
    head: int | None,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    epsilon: float = 1e-6,
    epsilon_name: str = "rms_norm_eps",
    std: float = 0.02,
    dropout: float = 0.0,
) -> tuple[Same, ...]:
    """The fields that are copied, with the family's defaults."""
    return (
        Same("num_layers", ("num_hidden_layers",), layers),
        Same("hidden_size", ("hidden_size",), hidden),
        Same("num_attention_heads", ("num_attention_heads",), heads),
        Same("num_query_groups", ("num_key_value_heads",), groups),
        Same("kv_channels", ("head_dim",), head),
        Same("ffn_hidden_size", ("intermediate_size",), inner),
        Same("max_position_embeddings", ("max_position_embeddings",), positions),
        Same("vocab_size", ("vocab_size",), vocabulary),
        Same("norm_epsilon", (epsilon_name,), epsilon),
        Same("init_method_std", ("initializer_range",), std),
        Same("attention_dropout", ("attention_dropout",), dropout),
    )


def layer_rules(ours: str, theirs: str, *, bias: bool = False) -> tuple[TensorRule, ...]:
    """Weight, and bias, of a layer of each block."""
    ours, theirs = f"{_BLOCK}.{ours}", f"{_THEIRS}.{theirs}"
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in kinds)


def block_rules(
    *,
    biases: bool = False,
    qkv_bias: bool = False,
    qkv: Layout = q_k_v,
    head_norms: bool = False,
    norms: Mapping[str, str] = _NORMS,
    norm_bias: bool = False,
    mlp: Mapping[str, str] = _MLP,
) -> tuple[TensorRule, ...]:
    """The tensors; those that a model does not have are not asked for.

    Args:
        biases: all linear layers may have biases.
        qkv_bias: the projections of queries, keys and values may.
        qkv: order of their rows.
        head_norms: there are norms of queries and keys.
        norms: of a block, by megacore's name.
        norm_bias: norms have biases.
        mlp: the projections of the feed-forward layer, by megacore's name.
    """
    attention = f"{_THEIRS}.self_attn"
    fused = tuple(
        TensorRule(f"{_BLOCK}.attention.qkv.{kind}", tuple(f"{attention}.{one}_proj.{kind}" for one in "qkv"), qkv)
        for kind in (("weight", "bias") if biases or qkv_bias else ("weight",))
    )
    of_heads = layer_rules("attention.query_norm", "self_attn.q_norm") if head_norms else ()
    of_heads += layer_rules("attention.key_norm", "self_attn.k_norm") if head_norms else ()
    return (
        TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        *fused,
        *of_heads,
        *layer_rules("attention.output", "self_attn.o_proj", bias=biases),
        *(rule for ours, theirs in norms.items() for rule in layer_rules(ours, theirs, bias=norm_bias)),
        *(rule for ours, theirs in mlp.items() for rule in layer_rules(f"mlp.{ours}", f"mlp.{theirs}", bias=biases)),
        TensorRule("head.norm.weight", ("model.norm.weight",)),
        *([TensorRule("head.norm.bias", ("model.norm.bias",))] if norm_bias else []),
        TensorRule("head.weight", ("lm_head.weight",)),
    )


def read_common(reader: ConfigReader, *, tied: bool = False, base: float = 10_000.0) -> dict[str, Any]:
    """Positions, by default with this `base`, and whether the output layer is the embedding, by default `tied`."""
    positions = reader.get("max_position_embeddings")
    fields = read_rope(reader, positions if type(positions) is int else 1, usual_base=base)
    if fields.get("rotary_percent", 1.0) != 1.0:
        reader.problem("partial_rotary_factor", f"is {fields['rotary_percent']}, but this family rotates whole heads")
    reader.only("partial_rotary_factor", (1.0, 1, None))
    return fields | read_tied(reader, default=tied)


# ---- biases ----------------------------------------------------------------------------------------------------------


def read_biases(reader: ConfigReader) -> dict[str, Any]:
    """Which linear layers have biases, by `attention_bias` and `mlp_bias`."""
    attention, mlp = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if type(attention) is not bool or type(mlp) is not bool:
        reader.problem(
            "attention_bias", f"is {str(attention)[:20]!r} and mlp_bias {str(mlp)[:20]!r}, not true or false"
        )
        return {"disable_bias_linear": True}
    if attention and mlp:
        return {"disable_bias_linear": False}
    of_attention = {"add_qkv_bias": attention, "add_attention_output_bias": attention}
    return {"disable_bias_linear": True, "add_mlp_bias": mlp, **of_attention}


def write_biases(config: ResolvedModel) -> dict[str, Any]:
    """The same for the file."""
    return {"attention_bias": config.attention_output_bias, "mlp_bias": config.mlp_bias}


def _read_llama(reader: ConfigReader) -> dict[str, Any]:
    reader.only("layer_types", (None,))
    return read_common(reader) | read_biases(reader)


def _write_llama(config: ResolvedModel) -> dict[str, Any]:
    return write_rope(config) | write_tied(config) | write_biases(config)


# ---- windows ---------------------------------------------------------------------------------------------------------


def _read_mistral(reader: ConfigReader) -> dict[str, Any]:
    reader.only("layer_types", (None,))
    return read_common(reader) | {"disable_bias_linear": True, "window_size": window_of(reader, default=4096)}


def _write_mistral(config: ResolvedModel) -> dict[str, Any]:
    return write_rope(config) | write_tied(config) | {"sliding_window": config.window_size}


def window_of(reader: ConfigReader, default: int | None) -> int | None:
    """The window of all layers, as the file has it."""
    window = reader.get("sliding_window", default)
    if window == 0 and reader.get("use_sliding_window", True) is False:  # as transformers writes it of Qwen2-MoE
        return None
    if window is not None and (type(window) is not int or window < 1):
        reader.problem("sliding_window", f"is {str(window)[:40]!r}, not a number of positions")
        return None
    return window


def _windows_of_qwen(reader: ConfigReader) -> dict[str, Any]:
    """Which layers have a window, and its size."""
    layers, uses = reader.get("num_hidden_layers", 32), reader.get("use_sliding_window", False)
    window, first = window_of(reader, default=4096), reader.get("max_window_layers", 28)
    if type(uses) is not bool or type(first) is not int or type(layers) is not int or not 0 < layers <= 10_000:
        reader.problem("use_sliding_window", "or max_window_layers is not of its type")
        return {}
    kinds = read_layer_types(reader, layers)
    if kinds is None:
        slides = max(0, layers - max(first, 0)) if uses and window is not None else 0
        kinds = FULL * (layers - slides) + WINDOW * slides
    if WINDOW in kinds and (not uses or window is None):
        reader.problem("layer_types", "has sliding_attention, but use_sliding_window is false or sliding_window null")
    return pattern_fields(kinds, window)


def write_window_of_qwen(config: ResolvedModel) -> dict[str, Any]:
    """The windows for the file."""
    uses = config.window_size is not None
    values: dict[str, Any] = {"use_sliding_window": uses, "sliding_window": config.window_size}
    if config.attention_pattern is not None:
        return values | {"layer_types": write_layer_types(config)}
    return values | ({"max_window_layers": 0} if uses else {})


def _read_qwen2(reader: ConfigReader) -> dict[str, Any]:
    return read_common(reader) | {
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        **_windows_of_qwen(reader),
    }


def _read_qwen3(reader: ConfigReader) -> dict[str, Any]:
    return read_common(reader) | {
        "disable_bias_linear": True,
        "qk_layernorm": True,
        **_windows_of_qwen(reader),
    }


def _write_qwen(config: ResolvedModel) -> dict[str, Any]:
    return write_rope(config) | write_tied(config) | write_window_of_qwen(config)


# ---- the families ----------------------------------------------------------------------------------------------------


def llama_like(model_type: str, architecture: str, **parts: Any) -> Family:
    """A family of the same kind of block, with its differences."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        fixed={"hidden_act": (("silu", "swish"), "silu")} | parts.pop("fixed", {}),
        constants={**_CONSTANTS, **parts.pop("constants", {})},
        buffers=(".rotary_emb.inv_freq",),
        ties={"lm_head.weight": "model.embed_tokens.weight"},
        **parts,
    )


LLAMA = llama_like(
    "llama",
    "LlamaForCausalLM",
    same=same_fields(groups=None, positions=2048, inner=11008, vocabulary=32000, head=None),
    read=_read_llama,
    write=_write_llama,
    rules=block_rules(biases=True),
)
MISTRAL = llama_like(
    "mistral",
    "MistralForCausalLM",
    same=same_fields(groups=8, positions=131072, inner=14336, vocabulary=32000, head=None),
    read=_read_mistral,
    write=_write_mistral,
    rules=block_rules(),
)
QWEN2 = llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    same=same_fields(groups=32, positions=32768, inner=22016, vocabulary=151936, head=None),
    read=_read_qwen2,
    write=_write_qwen,
    rules=block_rules(qkv_bias=True),
)
QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    same=same_fields(groups=32, positions=32768, inner=22016, vocabulary=151936, head=128),
    fixed={"attention_bias": ((False,), False)},
    read=_read_qwen3,
    write=_write_qwen,
    rules=block_rules(head_norms=True),
)
