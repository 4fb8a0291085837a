"""The model that Megatron-LM's flags describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megacore.config import ModelConfig, ResolvedModel
from megacore.config.fields import field_infos
from megacore.convert.megatron_experts import experts_of
from megacore.errors import CheckpointError

# Their flag -> ours, and Megatron-LM's default.
_SAME: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "num_layers": (("num_layers", "encoder_num_layers"), None),
    "hidden_size": (("hidden_size",), None),
    "num_attention_heads": (("num_attention_heads",), None),
    "ffn_hidden_size": (("ffn_hidden_size",), None),
    "kv_channels": (("kv_channels",), None),
    "max_position_embeddings": (("max_position_embeddings",), None),
    "norm_epsilon": (("norm_epsilon", "layernorm_epsilon"), 1e-5),
    "init_method_std": (("init_method_std",), 0.02),
    "hidden_dropout": (("hidden_dropout",), 0.1),
    "attention_dropout": (("attention_dropout",), 0.1),
    "normalization": (("normalization",), "LayerNorm"),
    "qk_layernorm": (("qk_layernorm",), False),
    "untie_embeddings_and_output_weights": (("untie_embeddings_and_output_weights",), False),
}
# What megacore computes; another value is another model.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,),
    "rotary_interleaved": (False,),
    "multi_latent_attention": (False,),
    "window_size": (None,),
    "qk_l2_norm": (False,),
    "mtp_num_layers": (None, 0),
    "num_tokentypes": (0,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    # Of Megatron core as of 2026.
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "window_attn_skip_freq": (None,),
    "attention_output_gate": (False,),
    "head_wise_attn_gate": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "linear_attention_freq": (None,),
    "no_rope_freq": (None,),
    "rotary_base_per_layer": (None,),
    "mrope_section": (None,),
    "glu_linear_offset": (0,),
    "activation_func_clamp_value": (None,),
    "moe_n_hash_layers": (0,),
    "use_mup": (False,),
    "mup_embedding_mult": (1,),
    "mup_output_mult": (1,),
    "enable_hyper_connections": (False,),
    "is_hybrid_model": (False,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_attention_ratio": (0,),
    "hybrid_mlp_ratio": (0,),
    "mtp_hybrid_override_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "retro_add_retriever": (False,),
    "spec": (None,),
}
# Flags that choose an activation -> ours, or None where megacore lacks it. Without one it is a form of GELU.
_ACTIVATIONS: dict[str, str | None] = {"swiglu": "swiglu", "squared_relu": "relu2", "quick_geglu": None}
_ACTIVATION_NAME = re.compile(r"(elu|glu|silu|swish)$")
# Of these tokenizers vocab_size is the size without the token that ends a document, which has an additional row; but
# not in versions of Megatron-LM in which a flag sets its id.
_WITHOUT_END = ("NullTokenizer", "NullMultimodalTokenizer")
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "alibi": "alibi", "none": "none"}


def model_of(args: Mapping[str, Any], padded: int, vocab_size: int | None, where: str) -> ResolvedModel:
    """The model of a checkpoint, resolved.

    Args:
        args: its flags.
        padded: rows of its embedding, with padding.
        vocab_size: the vocabulary's size if the user gave it.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: everything that megacore cannot represent exactly, by flag.
    """
    problems = []
    for name, allowed in _ONLY.items():
        if name in args and args[name] not in allowed:
            problems.append(f"{name} is {str(args[name])[:40]!r}, which megacore does not have")
    fields: dict[str, Any] = {}
    for ours, (names, default) in _SAME.items():
        value = next((args[name] for name in names if args.get(name) is not None), default)
        kind, optional = field_infos(ModelConfig)[ours].kind, field_infos(ModelConfig)[ours].optional
        if type(value) is not kind and not (kind is float and type(value) is int) and not (optional and value is None):
            problems.append(f"{names[0]} is {str(value)[:40]!r}, not a {kind.__name__}")
            continue
        fields[ours] = value
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
