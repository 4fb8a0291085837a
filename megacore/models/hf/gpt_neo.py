"""GPT-Neo: GPT-2's block whose projections of queries, keys and values have no biases and whose scores are not scaled,
with a window in some layers."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WINDOW
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import (
    ACTIVATIONS,
    Family,
    Same,
    TensorRule,
    q_k_v,
    read_tied,
    write_activation,
    write_tied,
)
from megacore.models.hf.kinds_of_layers import pattern_fields

_BLOCK = "transformer.h.{i}"
_LETTERS = {"local": WINDOW, "global": FULL}
_NAMES = {letter: name for name, letter in _LETTERS.items()}
_MOST = 10_000  # layers


def _kinds(reader: ConfigReader, layers: Any) -> str:
    """The letters of the layers, from `attention_types`: pairs of names and how often they are repeated."""
    kinds = ""
    types = reader.get("attention_types", [[["global", "local"], 12]])
    for pair in types if isinstance(types, list) else [None]:
        names, times = pair if isinstance(pair, list) and len(pair) == 2 else (None, 0)
        if not isinstance(names, list) or not names or not set(map(str, names)) <= _LETTERS.keys():
            reader.problem("attention_types", "is not a list of pairs: names of global and local, and a number")
            return FULL
        if type(times) is not int or not 0 < times * len(names) <= _MOST:
            reader.problem("attention_types", f"repeats kinds of layers {str(times)[:20]!r} times")
            return FULL
        kinds += "".join(_LETTERS[name] for name in names) * times
        if len(kinds) > _MOST:
            break
    if len(kinds) != layers:
        reader.problem("attention_types", f"has {len(kinds)} entries for {layers} layers")
    listed = reader.get("attention_layers")  # which transformers makes anew
    if listed is not None and listed != [_NAMES[kind] for kind in kinds]:
        reader.problem("attention_layers", "differs from attention_types")
    return kinds or FULL


def _read(reader: ConfigReader) -> dict[str, Any]:
    window = reader.get("window_size", 256)
    if type(window) is not int or window < 1:
        reader.problem("window_size", f"is {str(window)[:40]!r}, not a number of positions")
        window = 256
    return (
        pattern_fields(_kinds(reader, reader.get("num_layers", 24)), window)
        | read_tied(reader, default=True)
        | {"activation": reader.activation("activation_function", ACTIVATIONS, "gelu_new")}
    )


def _write(config: ResolvedModel) -> dict[str, Any]:
    names = [_NAMES.get(kind) for kind in config.attention_kinds]
    return write_tied(config) | {
        "attention_types": [[names, 1]],
        "window_size": config.window_size or 256,
        "activation_function": write_activation(config),
    }


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    ours, theirs = f"blocks.{{i}}.{ours}", f"{_BLOCK}.{theirs}"
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    prefix="transformer.",
    same=(
        Same("num_layers", ("num_layers", "num_hidden_layers"), 24),
        Same("hidden_size", ("hidden_size",), 2048),
        Same("num_attention_heads", ("num_heads", "num_attention_heads"), 16),
        Same("ffn_hidden_size", ("intermediate_size",), None),
        Same("max_position_embeddings", ("max_position_embeddings",), 2048),
        Same("vocab_size", ("vocab_size",), 50257),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("hidden_dropout", ("resid_dropout",), 0.0),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    ),
    constants={
        "disable_bias_linear": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "attention_multiplier": 1.0,
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
        TensorRule("embedding.positions", ("transformer.wpe.weight",)),
        *_both("attention_norm", "ln_1"),
        TensorRule(
            "blocks.{i}.attention.qkv.weight",
            tuple(f"{_BLOCK}.attn.attention.{one}_proj.weight" for one in "qkv"),
            q_k_v,
        ),
        *_both("attention.output", "attn.attention.out_proj"),
        *_both("mlp_norm", "ln_2"),
        *_both("mlp.up", "mlp.c_fc"),
        *_both("mlp.down", "mlp.c_proj"),
        TensorRule("head.norm.weight", ("transformer.ln_f.weight",)),
        TensorRule("head.norm.bias", ("transformer.ln_f.bias",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
    ties={"lm_head.weight": "transformer.wte.weight"},
)
