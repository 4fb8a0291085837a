"""Phi-1, 1.5 and 2: attention and feed-forward layer side by side after one norm, rotary positions on a part of each
head, biases in every linear layer and in the output layer."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
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
from megacore.models.hf.llama import layer_rules, same_fields
from megacore.models.hf.rope import read_rope, write_rope


def _read(reader: ConfigReader) -> dict[str, Any]:
    positions, share = reader.get("max_position_embeddings", 2048), reader.get("partial_rotary_factor", 0.5)
    normed = reader.get("qk_layernorm", False)
    if type(normed) is not bool:
        reader.problem("qk_layernorm", f"is {str(normed)[:20]!r}, not true or false")
    return (
        read_rope(reader, positions if type(positions) is int else 1, share=share)
        | read_tied(reader, default=False)
        | {
            "activation": reader.activation("hidden_act", ACTIVATIONS, "gelu_new"),
            "qk_layernorm": normed is True,
        }
    )


def _write(config: ResolvedModel) -> dict[str, Any]:
    values = {"hidden_act": write_activation(config), "qk_layernorm": config.qk_layernorm}
    return write_rope(config, share=True) | write_tied(config) | values


PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    prefix="model.",
    same=(
        *same_fields(
            groups=None,
            positions=2048,
            inner=8192,
            vocabulary=51200,
            head=None,
            layers=24,
            hidden=2048,
            epsilon=1e-5,
            epsilon_name="layer_norm_eps",
        ),
        Same("hidden_dropout", ("resid_pdrop",), 0.0),
    ),
    constants={"parallel_residual": True, "shared_parallel_norm": True, "add_output_layer_bias": True},
    read=_read,
    write=_write,
    rules=(
        TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        *layer_rules("attention_norm", "input_layernorm", bias=True),
        *(
            TensorRule(
                f"blocks.{{i}}.attention.qkv.{kind}",
                tuple(f"model.layers.{{i}}.self_attn.{one}_proj.{kind}" for one in "qkv"),
                q_k_v,
            )
            for kind in ("weight", "bias")
        ),
        *layer_rules("attention.query_norm", "self_attn.q_layernorm", bias=True),
        *layer_rules("attention.key_norm", "self_attn.k_layernorm", bias=True),
        *layer_rules("attention.output", "self_attn.dense", bias=True),
        *layer_rules("mlp.up", "mlp.fc1", bias=True),
        *layer_rules("mlp.down", "mlp.fc2", bias=True),
        TensorRule("head.norm.weight", ("model.final_layernorm.weight",)),
        TensorRule("head.norm.bias", ("model.final_layernorm.bias",)),
        TensorRule("head.weight", ("lm_head.weight",)),
        TensorRule("head.bias", ("lm_head.bias",)),
    ),
    buffers=(".rotary_emb.inv_freq",),
    ties={"lm_head.weight": "model.embed_tokens.weight"},
)
