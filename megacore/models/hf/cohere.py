"""Command R and R7B: attention and feed-forward layer side by side after one LayerNorm without a bias, and scaled
logits. Command R7B has a window in three layers of four, and rotates only those.

They rotate pairs of neighbouring dimensions, and megacore dimension i with i + d/2.
"""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WITHOUT_POSITIONS
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import neighbouring_q_k_v, write_tied
from megacore.models.hf.kinds_of_layers import pattern_fields, read_kinds, require_window, write_layer_types
from megacore.models.hf.llama import block_rules, llama_like, read_biases, read_common, same_fields, window_of
from megacore.models.hf.rope import write_rope

_CONSTANTS = {"normalization": "LayerNorm", "norm_bias": False, "parallel_residual": True, "shared_parallel_norm": True}
_RULES = block_rules(biases=True, qkv=neighbouring_q_k_v, norms={"attention_norm": "input_layernorm"})


def _scale(reader: ConfigReader) -> dict[str, Any]:
    """Logits are multiplied."""
    scale = reader.get("logit_scale", 0.0625)
    if type(scale) not in (int, float) or scale <= 0:
        reader.problem("logit_scale", f"is {str(scale)[:40]!r}, not a positive number")
        scale = 1.0
    return {"logits_divisor": 1 / scale}


def _write_common(config: ResolvedModel) -> dict[str, Any]:
    biases, scale = {"attention_bias": config.attention_output_bias}, {"logit_scale": 1 / config.logits_divisor}
    return write_rope(config) | write_tied(config) | biases | scale


COHERE = llama_like(
    "cohere",
    "CohereForCausalLM",
    same=same_fields(
        groups=None,
        positions=8192,
        inner=22528,
        vocabulary=256000,
        head=None,
        layers=40,
        hidden=8192,
        heads=64,
        epsilon=1e-5,
        epsilon_name="layer_norm_eps",
    ),
    fixed={"use_qk_norm": ((False, None), False)},
    constants=_CONSTANTS,
    ignored=frozenset(("model_max_length",)),
    read=lambda reader: read_common(reader, tied=True, base=500_000.0) | read_biases(reader) | _scale(reader),
    write=_write_common,
    rules=_RULES,
)


# ---- Command R7B -----------------------------------------------------------------------------------------------------


def _read_cohere2(reader: ConfigReader) -> dict[str, Any]:
    window, period = window_of(reader, default=4096), reader.get("sliding_window_pattern", 4)
    kinds = read_kinds(reader, reader.get("num_hidden_layers", 40), period, "sliding_window_pattern")
    require_window(reader, kinds, window)
    pattern = pattern_fields(kinds.replace(FULL, WITHOUT_POSITIONS), window)
    return read_common(reader, tied=True) | read_biases(reader) | _scale(reader) | pattern


def _write_cohere2(config: ResolvedModel) -> dict[str, Any]:
    types = write_layer_types(config, full=WITHOUT_POSITIONS)
    return _write_common(config) | {"layer_types": types, "sliding_window": config.window_size or 4096}


COHERE2 = llama_like(
    "cohere2",
    "Cohere2ForCausalLM",
    same=COHERE.same,
    optional={  # which transformers does not look at
        "use_qk_norm": (False,),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0, 1),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (False,),
        "order_of_interleaved_layers": ("local_attn_first",),
    },
    constants=_CONSTANTS,
    ignored=frozenset(("model_max_length", "cache_implementation", "layer_switch", "use_embedding_sharing")),
    read=_read_cohere2,
    write=_write_cohere2,
    rules=_RULES,
)
