"""The model that Megatron-LM's flags describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megacore.config import ModelConfig, ResolvedModel
from megacore.convert.megatron_experts import experts_of
from megacore.convert.megatron_rows import read_fields
from megacore.errors import CheckpointError

# Flags that choose an activation -> ours, or None where megacore lacks it. Without one it is a form of GELU.
_ACTIVATIONS: dict[str, str | None] = {"swiglu": "swiglu", "squared_relu": "relu2", "quick_geglu": None}
_ACTIVATION_NAME = re.compile(r"(elu|glu|silu|swish)$")
# Of these tokenizers vocab_size is the size without the token that ends a document, which has an additional row; but
# not in versions of Megatron-LM in which a flag sets its id.
_WITHOUT_END = ("NullTokenizer", "NullMultimodalTokenizer")
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "alibi": "alibi", "none": "none"}


def model_of(args: Mapping[str, Any], padded: int, vocab_size: int | None, where: str) -> ResolvedModel:
    """The model of a checkpoint, resolved. `padded`: rows of its embedding. `vocab_size`: None: the user gave none.
    Raises CheckpointError with everything that megacore cannot represent exactly, by flag."""
    problems: list[str] = []
    fields = read_fields(args, ModelConfig, problems)
    said = args.get("vocab_size")
    if type(said) is int and said > 0:
        said += args.get("tokenizer_type") in _WITHOUT_END and "null_tokenizer_eod_id" not in args
    fields["vocab_size"] = vocab_size or (said if type(said) is int and said > 0 else padded)
    if fields["vocab_size"] > padded:
        problems.append(f"the embedding has {padded} rows, fewer than the vocabulary of {fields['vocab_size']}")
    fields |= _layers(args, problems) | _positions(args, problems)
    experts = experts_of(args, fields.get("num_layers"), problems)
    if not problems:
        config = ModelConfig(**fields)
        problems = config.problems()
        if not problems and config.max_position_embeddings is not None:
            model = config.resolve(seq_length=config.max_position_embeddings)
            return model if experts is None else replace(model, experts=experts.resolve(model.ffn_hidden_size))
    listed = "".join(f"\n  - {problem}" for problem in problems or ["max_position_embeddings is missing"])
    raise CheckpointError(f"{where}: its args describe a model that megacore cannot represent exactly:{listed}")


def _layers(args: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    bias = bool(args.get("add_bias_linear", True))
    groups = args.get("num_query_groups") if args.get("group_query_attention", False) else None
    if groups is not None and type(groups) is not int:
        problems.append(f"num_query_groups is {str(groups)[:40]!r}, not a int")
        groups = None
    return {
        "activation": _activation(args, bias, problems),
        "layernorm_1p": any(args.get(name) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma")),
        "disable_bias_linear": not bias,
        "add_qkv_bias": not bias and bool(args.get("add_qkv_bias", False)),
        "num_query_groups": groups,
    }


def _activation(args: Mapping[str, Any], bias: bool, problems: list[str]) -> str | None:
    """The activation, or None where a flag asks for one that is not known here."""
    chosen = [name for name, value in args.items() if value and _ACTIVATION_NAME.search(name) and name != "openai_gelu"]
    unknown = [name for name in chosen if _ACTIVATIONS.get(name) is None]
    problems += [f"{name} is {str(args[name])[:40]!r}, which megacore does not have" for name in unknown]
    if len(chosen) > 1:
        problems.append(f"{' and '.join(chosen)} are both set, but a model has one activation")
    if chosen:
        return _ACTIVATIONS.get(chosen[0])
    # The fused GELU is the tanh form; the plain one is exact.
    fused = bias and bool(args.get("bias_gelu_fusion", True))
    return "gelu" if args.get("openai_gelu", False) or fused else "gelu-exact"


def _positions(args: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    given = args.get("position_embedding_type", "learned_absolute")
    if args.get("use_rotary_position_embeddings"):
        given = "rope"
    if not isinstance(given, str) or given not in _POSITIONS:
        problems.append(f"position_embedding_type is {str(given)[:40]!r}, which megacore does not have")
        return {}
    fields: dict[str, Any] = {"position_embedding_type": _POSITIONS[given]}
    if given != "rope":
        return fields
    fields |= {
        "rotary_base": _number(args, "rotary_base", 10_000.0, problems),
        "rotary_percent": _number(args, "rotary_percent", 1.0, problems),
    }
    if args.get("use_rope_scaling"):
        fields |= {
            "rope_scaling": "llama3",
            "rope_scaling_factor": _number(args, "rope_scaling_factor", 8.0, problems),
            "rope_original_max_positions": 8192,
        }
    return fields


def _number(args: Mapping[str, Any], name: str, default: float, problems: list[str]) -> float:
    value = args.get(name) or default
    try:
        if type(value) in (int, float):
            return float(value)
    except OverflowError:
        pass
    problems.append(f"{name} is {str(value)[:40]!r}, not a number")
    return default
