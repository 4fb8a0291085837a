"""GLM-4 9B (glm) and GLM-4 0414 (glm4): gate and up projection in one tensor, rotary positions on a part of each head,
biases of queries, keys and values; in glm4 norms of the outputs of its layers too.

They rotate pairs of neighbouring dimensions, and megacore dimension i with i + r/2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, TensorRule, neighbouring_q_k_v, read_tied, write_tied
from megacore.models.hf.llama import block_rules, llama_like, same_fields
from megacore.models.hf.llama_variants import stacked_gate_and_up
from megacore.models.hf.rope import read_rope, write_rope


def _read(reader: ConfigReader) -> dict[str, Any]:
    positions, share = reader.get("max_position_embeddings", 131072), reader.get("partial_rotary_factor", 0.5)
    bias = reader.get("attention_bias", True)
    if type(bias) is not bool:
        reader.problem("attention_bias", f"is {str(bias)[:20]!r}, not true or false")
    return (
        read_rope(reader, positions if type(positions) is int else 1, share=share)
        | read_tied(reader, default=False)
        | {"disable_bias_linear": True, "add_qkv_bias": bias is True}
    )


def _write(config: ResolvedModel) -> dict[str, Any]:
    values = {"attention_bias": config.qkv_bias, "pad_token_id": None}  # whose default is of the released vocabulary
    return write_rope(config, share=True) | write_tied(config) | values


def _family(model_type: str, architecture: str, norms: Mapping[str, str], placement: str) -> Family:
    matrices = block_rules(qkv_bias=True, qkv=neighbouring_q_k_v, norms=norms, mlp={"down": "down_proj"})
    return llama_like(
        model_type,
        architecture,
        same=same_fields(
            groups=2, positions=131072, inner=13696, vocabulary=151552, head=128, layers=40, epsilon=1.5625e-07
        ),
        constants={"norm_placement": placement},
        read=_read,
        write=_write,
        rules=(
            *matrices,
            *(
                TensorRule(f"blocks.{{i}}.mlp.{one}.weight", ("model.layers.{i}.mlp.gate_up_proj.weight",), layout)
                for one, layout in stacked_gate_and_up.items()
            ),
        ),
    )


GLM = _family(
    "glm",
    "GlmForCausalLM",
    {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "before",
)
GLM4 = _family(
    "glm4",
    "Glm4ForCausalLM",
    {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    "both",
)
