"""Tiny random models of transformers, one a family, and the same models here: configuration, and weights by name.

Only names and orders of elements are translated: q, k, v into [group][q..., k, v][d].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megacore.config import ModelConfig, ResolvedModel

VOCAB, POSITIONS, LAYERS, HIDDEN, HEADS = 101, 40, 2, 32, 4

_ROPE = {"position_embedding_type": "rope", "activation": "swiglu", "normalization": "RMSNorm"}
_LLAMA: dict[str, Any] = {**_ROPE, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_GROUPED = {**_SHAPE, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        theirs: makes the configuration of transformers.
        changes: fields of ModelConfig besides the common shape.
        names: makes pairs of global name and the name, or names to fuse, in transformers; without `.weight`, `.bias`.
        groups: key and value heads.
    """

    theirs: Callable[[], Any]
    changes: dict[str, Any]
    names: Callable[[], Iterator[tuple[str, str | tuple[str, str, str]]]]
    groups: int = HEADS


def _llama_names() -> Iterator[tuple[str, str | tuple[str, str, str]]]:
    yield "embedding.tokens", "model.embed_tokens"
    for i in range(LAYERS):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield f"{ours}.attention_norm", f"{theirs}.input_layernorm"
        q, k, v = (f"{theirs}.self_attn.{kind}_proj" for kind in "qkv")
        yield f"{ours}.attention.qkv", (q, k, v)
        yield f"{ours}.attention.query_norm", f"{theirs}.self_attn.q_norm"
        yield f"{ours}.attention.key_norm", f"{theirs}.self_attn.k_norm"
        yield f"{ours}.attention.output", f"{theirs}.self_attn.o_proj"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        for kind in ("gate", "up", "down"):
            yield f"{ours}.mlp.{kind}", f"{theirs}.mlp.{kind}_proj"
    yield "head.norm", "model.norm"
    yield "head", "lm_head"


def _neox_names() -> Iterator[tuple[str, str]]:
    yield "embedding.tokens", "gpt_neox.embed_in"
    for i in range(LAYERS):
        ours, theirs = f"blocks.{i}", f"gpt_neox.layers.{i}"
        yield f"{ours}.attention_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.attention.qkv", f"{theirs}.attention.query_key_value"  # [head][q, k, v][d] already
        yield f"{ours}.attention.output", f"{theirs}.attention.dense"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        yield f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h"
        yield f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h"
    yield "head.norm", "gpt_neox.final_layer_norm"
    yield "head", "lm_head"


def _bloom_names() -> Iterator[tuple[str, str]]:
    yield "embedding.tokens", "transformer.word_embeddings"
    yield "embedding.norm", "transformer.word_embeddings_layernorm"
    for i in range(LAYERS):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        yield f"{ours}.attention_norm", f"{theirs}.input_layernorm"
        yield f"{ours}.attention.qkv", f"{theirs}.self_attention.query_key_value"  # likewise
        yield f"{ours}.attention.output", f"{theirs}.self_attention.dense"
        yield f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm"
        yield f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h"
        yield f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h"
    yield "head.norm", "transformer.ln_f"


def _llama(rope: dict[str, Any] | None = None, **changes: Any) -> Callable[[], Any]:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **(rope or {})}
    return lambda: transformers.LlamaConfig(**{**_GROUPED, "rope_parameters": parameters, **changes})


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3_FIELDS = {
    "rotary_base": 500_000.0,
    "rope_scaling": "llama3",
    "rope_scaling_factor": 4.0,
    "rope_original_max_positions": 16,
}

FAMILIES = {
    "llama2": Family(
        theirs=_llama(num_key_value_heads=HEADS), changes={**_LLAMA, "ffn_hidden_size": 48}, names=_llama_names
    ),
    "llama3": Family(
        theirs=_llama(_LLAMA3_ROPE, tie_word_embeddings=True),
        changes={**_LLAMA, **_LLAMA3_FIELDS, "untie_embeddings_and_output_weights": False, "ffn_hidden_size": 48},
        names=_llama_names,
        groups=2,
    ),
    "llama-linear": Family(
        theirs=_llama({"rope_type": "linear", "factor": 3.0}),
        changes={**_LLAMA, "rope_scaling": "linear", "rope_scaling_factor": 3.0, "ffn_hidden_size": 48},
        names=_llama_names,
        groups=2,
    ),
    "llama-dynamic": Family(
        theirs=_llama({"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=24),
        changes={
            **_LLAMA,
            "rope_scaling": "dynamic",
            "rope_scaling_factor": 2.0,
            "rope_original_max_positions": 24,
            "ffn_hidden_size": 48,
        },
        names=_llama_names,
        groups=2,
    ),
    "llama-yarn": Family(
        theirs=_llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0}),
        changes={
            **_LLAMA,
            "rope_scaling": "yarn",
            "rope_scaling_factor": 4.0,
            "rope_original_max_positions": 10,
            "rope_beta_fast": 4.0,
            "ffn_hidden_size": 48,
        },
        names=_llama_names,
        groups=2,
    ),
    "mistral": Family(
        theirs=lambda: transformers.MistralConfig(**_GROUPED, sliding_window=7, head_dim=16),
        changes={**_LLAMA, "window_size": 7, "kv_channels": 16, "ffn_hidden_size": 48},
        names=_llama_names,
        groups=2,
    ),
    "qwen2": Family(
        theirs=lambda: transformers.Qwen2Config(**_GROUPED),
        changes={**_LLAMA, "add_qkv_bias": True, "ffn_hidden_size": 48},
        names=_llama_names,
        groups=2,
    ),
    "qwen3": Family(
        theirs=lambda: transformers.Qwen3Config(**_GROUPED, head_dim=16),
        changes={**_LLAMA, "qk_layernorm": True, "kv_channels": 16, "ffn_hidden_size": 48},
        names=_llama_names,
        groups=2,
    ),
    "neox": Family(
        theirs=lambda: transformers.GPTNeoXConfig(
            **_SHAPE, intermediate_size=64, rotary_pct=0.25, max_position_embeddings=POSITIONS
        ),
        changes={
            "position_embedding_type": "rope",
            "rotary_percent": 0.25,
            "activation": "gelu-exact",
            "parallel_residual": True,
            "untie_embeddings_and_output_weights": True,
            "ffn_hidden_size": 64,
        },
        names=_neox_names,
    ),
    "bloom": Family(
        theirs=lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS),
        changes={"position_embedding_type": "alibi", "embedding_layernorm": True},
        names=_bloom_names,
    ),
}


def reference(family: Family) -> nn.Module:
    """transformers' model with large random weights, so that nothing wrong can hide."""
    config = family.theirs()
    config.initializer_range = 0.2
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    found: nn.Module = model
    return found


def model_config(family: Family) -> ResolvedModel:
    """The same model here."""
    theirs = family.theirs()
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    common: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": family.groups,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "make_vocab_size_divisible_by": 8,
        "norm_epsilon": next(getattr(theirs, name) for name in names if hasattr(theirs, name)),
    }
    return ModelConfig(**(common | family.changes)).resolve(seq_length=POSITIONS)


def translated(family: Family, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors, parameters or their gradients, under global names."""
    found = {}
    for ours, theirs in family.names():
        for kind in ("weight", "bias"):
            if isinstance(theirs, tuple):
                parts = [tensors.get(f"{part}.{kind}") for part in theirs]
                if all(part is not None for part in parts):
                    found[f"{ours}.{kind}"] = by_group([p for p in parts if p is not None], family.groups)
            elif (tensor := tensors.get(f"{theirs}.{kind}")) is not None:
                found[f"{ours}.{kind}"] = tensor
    return found


def by_group(parts: list[Tensor], groups: int) -> Tensor:
    """Queries, keys and values, each [heads d, ...] -> [group][q..., k, v][d]."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
