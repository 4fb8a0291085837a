"""Llama 2 and 3, Mistral, Qwen2 and Qwen3: one kind of block, which differ in biases, windows and norms of heads."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Same, TensorRule, q_k_v, read_tied, write_tied
from megacore.models.hf.rope import read_rope, write_rope

_CONSTANTS = {"activation": "swiglu", "normalization": "RMSNorm", "hidden_dropout": 0.0}
_BLOCK, _THEIRS = "blocks.{i}", "model.layers.{i}"


def _same(*, groups: int | None, positions: int, inner: int, vocabulary: int, head: int | None) -> tuple[Same, ...]:
    """The fields that are copied, with the family's defaults."""
    return (
        Same("num_layers", ("num_hidden_layers",), 32),
        Same("hidden_size", ("hidden_size",), 4096),
        Same("num_attention_heads", ("num_attention_heads",), 32),
        Same("num_query_groups", ("num_key_value_heads",), groups),
        Same("kv_channels", ("head_dim",), head),
        Same("ffn_hidden_size", ("intermediate_size",), inner),
        Same("max_position_embeddings", ("max_position_embeddings",), positions),
        Same("vocab_size", ("vocab_size",), vocabulary),
        Same("norm_epsilon", ("rms_norm_eps",), 1e-6),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    )


def _layer(ours: str, theirs: str, *, bias: bool) -> tuple[TensorRule, ...]:
    ours, theirs = f"{_BLOCK}.{ours}", f"{_THEIRS}.{theirs}"
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in kinds)


def _rules(*, biases: bool = False, qkv_bias: bool = False, head_norms: bool = False) -> tuple[TensorRule, ...]:
    """The tensors; those that a model does not have are not asked for."""
    attention = f"{_THEIRS}.self_attn"
    fused = tuple(
        TensorRule(f"{_BLOCK}.attention.qkv.{kind}", tuple(f"{attention}.{one}_proj.{kind}" for one in "qkv"), q_k_v)
        for kind in (("weight", "bias") if biases or qkv_bias else ("weight",))
    )
    norms = _layer("attention.query_norm", "self_attn.q_norm", bias=False) if head_norms else ()
    norms += _layer("attention.key_norm", "self_attn.k_norm", bias=False) if head_norms else ()
    return (
        TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        *_layer("attention_norm", "input_layernorm", bias=False),
        *fused,
        *norms,
        *_layer("attention.output", "self_attn.o_proj", bias=biases),
        *_layer("mlp_norm", "post_attention_layernorm", bias=False),
        *(rule for one in ("gate", "up", "down") for rule in _layer(f"mlp.{one}", f"mlp.{one}_proj", bias=biases)),
        TensorRule("head.norm.weight", ("model.norm.weight",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    )


def read_common(reader: ConfigReader) -> dict[str, Any]:
    """Positions, and whether the output layer is the embedding."""
    positions = reader.get("max_position_embeddings")
    fields = read_rope(reader, positions if type(positions) is int else 1)
    if fields.get("rotary_percent", 1.0) != 1.0:
        reader.problem("partial_rotary_factor", f"is {fields['rotary_percent']}, but this family rotates whole heads")
    reader.only("partial_rotary_factor", (1.0, 1, None))
    return fields | read_tied(reader, default=False)


# ---- biases ----------------------------------------------------------------------------------------------------------


def _read_llama(reader: ConfigReader) -> dict[str, Any]:
    attention, mlp = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if type(attention) is not bool or attention is not mlp:
        reader.problem("attention_bias", f"is {attention!r} and mlp_bias {mlp!r}: megacore has both or neither")
    reader.only("layer_types", (None,))
    return read_common(reader) | {"disable_bias_linear": not attention}


def _write_llama(config: ResolvedModel) -> dict[str, Any]:
    bias = not config.disable_bias_linear
    return write_rope(config) | write_tied(config) | {"attention_bias": bias, "mlp_bias": bias}


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


def _window_of_qwen(reader: ConfigReader) -> int | None:
    """The window, where every layer has it: megacore has no layers of different kinds."""
    layers, uses = reader.get("num_hidden_layers", 32), reader.get("use_sliding_window", False)
    window, first = window_of(reader, default=4096), reader.get("max_window_layers", 28)
    kinds = reader.get("layer_types")
    if type(uses) is not bool or type(first) is not int or type(layers) is not int:
        reader.problem("use_sliding_window", "or max_window_layers is not of its type")
        return None
    if kinds is None:
        slides = uses and window is not None
        number = max(0, layers - first) if slides else 0
        name = "max_window_layers"
    elif isinstance(kinds, list) and set(map(str, kinds)) <= {"full_attention", "sliding_attention"}:
        number, name = kinds.count("sliding_attention"), "layer_types"
        if len(kinds) != layers:
            reader.problem("layer_types", f"has {len(kinds)} entries for {layers} layers")
    else:
        reader.problem("layer_types", "has kinds of layers that megacore does not know")
        return None
    if 0 < number < layers:
        reader.problem(name, f"gives a window to {number} of {layers} layers: megacore has it in all or none")
    if number and (not uses or window is None):
        reader.problem("layer_types", "has sliding_attention, but use_sliding_window is false or sliding_window null")
    return window if number else None


def write_window_of_qwen(config: ResolvedModel) -> dict[str, Any]:
    """The window of all layers for the file."""
    uses = config.window_size is not None
    values: dict[str, Any] = {"use_sliding_window": uses, "sliding_window": config.window_size}
    return values | ({"max_window_layers": 0} if uses else {})


def _read_qwen2(reader: ConfigReader) -> dict[str, Any]:
    return read_common(reader) | {
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "window_size": _window_of_qwen(reader),
    }


def _read_qwen3(reader: ConfigReader) -> dict[str, Any]:
    return read_common(reader) | {
        "disable_bias_linear": True,
        "qk_layernorm": True,
        "window_size": _window_of_qwen(reader),
    }


def _write_qwen(config: ResolvedModel) -> dict[str, Any]:
    return write_rope(config) | write_tied(config) | write_window_of_qwen(config)


# ---- the families ----------------------------------------------------------------------------------------------------


def _family(model_type: str, architecture: str, **parts: Any) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        fixed={"hidden_act": (("silu", "swish"), "silu"), **parts.pop("fixed", {})},
        constants=_CONSTANTS,
        buffers=(".rotary_emb.inv_freq",),
        ties={"lm_head.weight": "model.embed_tokens.weight"},
        **parts,
    )


LLAMA = _family(
    "llama",
    "LlamaForCausalLM",
    same=_same(groups=None, positions=2048, inner=11008, vocabulary=32000, head=None),
    read=_read_llama,
    write=_write_llama,
    rules=_rules(biases=True),
)
MISTRAL = _family(
    "mistral",
    "MistralForCausalLM",
    same=_same(groups=8, positions=131072, inner=14336, vocabulary=32000, head=None),
    read=_read_mistral,
    write=_write_mistral,
    rules=_rules(),
)
QWEN2 = _family(
    "qwen2",
    "Qwen2ForCausalLM",
    same=_same(groups=32, positions=32768, inner=22016, vocabulary=151936, head=None),
    read=_read_qwen2,
    write=_write_qwen,
    rules=_rules(qkv_bias=True),
)
QWEN3 = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    same=_same(groups=32, positions=32768, inner=22016, vocabulary=151936, head=128),
    fixed={"attention_bias": ((False,), False)},
    read=_read_qwen3,
    write=_write_qwen,
    rules=_rules(head_norms=True),
)
