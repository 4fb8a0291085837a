"""Granite, SmolLM3, OLMo, OLMo 2, Phi-3 and StableLM: Llama's block with multipliers, layers without positions, norms
without weights or after its layers, fused projections, or LayerNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WITHOUT_POSITIONS, repeated
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Layout, Run, Same, TensorRule, read_tied, stacked_q_k_v, write_tied
from megacore.models.hf.kinds_of_layers import pattern_fields
from megacore.models.hf.llama import (
    block_rules,
    llama_like,
    read_biases,
    read_common,
    same_fields,
    window_of,
    write_biases,
)
from megacore.models.hf.rope import read_rope, write_rope

# ---- Granite ---------------------------------------------------------------------------------------------------------

GRANITE = llama_like(
    "granite",
    "GraniteForCausalLM",
    same=(
        *same_fields(groups=None, positions=2048, inner=11008, vocabulary=32000, head=None),
        Same("embedding_multiplier", ("embedding_multiplier",), 1.0),
        Same("residual_multiplier", ("residual_multiplier",), 1.0),
        Same("attention_multiplier", ("attention_multiplier",), 1.0),
        Same("logits_divisor", ("logits_scaling",), 1.0),
    ),
    read=lambda reader: read_common(reader) | read_biases(reader),
    write=lambda config: (
        write_rope(config)
        | write_tied(config)
        | write_biases(config)
        | {"attention_multiplier": config.score_multiplier}
    ),
    rules=block_rules(biases=True),
)


# ---- SmolLM3 ---------------------------------------------------------------------------------------------------------


def _read_smollm3(reader: ConfigReader) -> dict[str, Any]:
    layers, rotated = reader.get("num_hidden_layers", 36), reader.get("no_rope_layers")
    interval = reader.get("no_rope_layer_interval", 4)
    kinds = FULL
    if isinstance(rotated, list) and rotated and set(map(str, rotated)) <= {"0", "1"}:
        kinds = "".join(FULL if one else WITHOUT_POSITIONS for one in rotated)
        if len(rotated) != layers:
            reader.problem("no_rope_layers", f"has {len(rotated)} entries for {layers} layers")
    elif rotated is None and type(interval) is int and 1 <= interval <= 10_000 and type(layers) is int and layers > 0:
        kinds = repeated(FULL * (interval - 1) + WITHOUT_POSITIONS, layers)
    else:
        reader.problem("no_rope_layers", f"is {str(rotated)[:40]!r}, not a list of 0 and 1 for the layers")
    types = reader.get("layer_types")
    if types is not None and (not isinstance(types, list) or set(map(str, types)) != {"full_attention"}):
        reader.problem("layer_types", "has windows, which megacore does not have in this family")
    fields = read_common(reader, tied=True, base=2_000_000.0)
    return fields | read_biases(reader) | pattern_fields(kinds, None)


def _write_smollm3(config: ResolvedModel) -> dict[str, Any]:
    rotated = [0 if kind == WITHOUT_POSITIONS else 1 for kind in config.attention_kinds]
    values = write_rope(config) | write_tied(config) | write_biases(config)
    return values | {"no_rope_layers": rotated, "pad_token_id": None}  # whose default is of the released vocabulary


SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3ForCausalLM",
    same=same_fields(
        groups=4, positions=32768, inner=11008, vocabulary=128256, head=None, layers=36, hidden=2048, heads=16
    ),
    fixed={"use_sliding_window": ((False,), False)},
    optional={"sliding_window": (None,)},
    ignored=frozenset(("max_window_layers",)),
    read=_read_smollm3,
    write=_write_smollm3,
    rules=block_rules(biases=True),
)


# ---- OLMo and OLMo 2 -------------------------------------------------------------------------------------------------

OLMO = llama_like(
    "olmo",
    "OlmoForCausalLM",
    same=(
        *(
            one
            for one in same_fields(groups=None, positions=2048, inner=11008, vocabulary=50304, head=None)
            if one.ours != "norm_epsilon"
        ),
        Same("clip_qkv", ("clip_qkv",), None),
    ),
    fixed={"attention_bias": ((False,), False)},
    constants={
        "disable_bias_linear": True,
        "normalization": "LayerNorm",
        "norm_affine": False,
        "norm_epsilon": 1e-5,
    },
    read=read_common,
    write=lambda config: write_rope(config) | write_tied(config),
    rules=block_rules(),
)
OLMO2 = llama_like(
    "olmo2",
    "Olmo2ForCausalLM",
    same=same_fields(groups=None, positions=2048, inner=11008, vocabulary=50304, head=None, epsilon=1e-5),
    fixed={"attention_bias": ((False,), False)},
    constants={
        "disable_bias_linear": True,
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "norm_placement": "after",
    },
    read=read_common,
    write=lambda config: write_rope(config) | write_tied(config),
    rules=block_rules(
        head_norms=True,
        norms={"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    ),
)


# ---- Phi-3 -----------------------------------------------------------------------------------------------------------


def _half(number: int) -> Layout:
    def runs(config: ResolvedModel) -> Iterator[Run]:
        inner = config.inner_size
        yield Run(source=0, start=number * inner, stop=(number + 1) * inner)

    return Layout(lambda config: (2 * config.inner_size,), runs)


# The gate and the other projection, which are stacked in one tensor.
stacked_gate_and_up = {"gate": _half(0), "up": _half(1)}


def _read_phi3(reader: ConfigReader) -> dict[str, Any]:
    positions, share = reader.get("max_position_embeddings", 4096), reader.get("partial_rotary_factor", 1.0)
    dropout = reader.get("resid_pdrop", 0.0)
    reader.only("layer_types", (None,))
    return (
        read_rope(
            reader,
            positions if type(positions) is int else 1,
            share=share,
            original=reader.get("original_max_position_embeddings", 4096),
            renamed={"su": "longrope", "yarn": "longrope"},
        )
        | read_tied(reader, default=False)
        | {
            "disable_bias_linear": True,
            "hidden_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
            "window_size": window_of(reader, default=None),
        }
    )


def _write_phi3(config: ResolvedModel) -> dict[str, Any]:
    before = config.rope_original_max_positions
    return (
        write_rope(config, share=True)
        | write_tied(config)
        | {"sliding_window": config.window_size, "resid_pdrop": config.hidden_dropout, "pad_token_id": None}
        | ({} if before is None else {"original_max_position_embeddings": before})
    )


_PHI3_LAYER = "model.layers.{i}"

PHI3 = llama_like(
    "phi3",
    "Phi3ForCausalLM",
    same=same_fields(groups=None, positions=4096, inner=8192, vocabulary=32064, head=None, hidden=3072, epsilon=1e-5),
    fixed={"attention_bias": ((False,), False)},
    ignored=frozenset(("embd_pdrop",)),
    read=_read_phi3,
    write=_write_phi3,
    rules=(
        *(rule for rule in block_rules(mlp={"down": "down_proj"}) if not rule.ours.endswith("qkv.weight")),
        TensorRule("blocks.{i}.attention.qkv.weight", (f"{_PHI3_LAYER}.self_attn.qkv_proj.weight",), stacked_q_k_v),
        *(
            TensorRule(f"blocks.{{i}}.mlp.{one}.weight", (f"{_PHI3_LAYER}.mlp.gate_up_proj.weight",), layout)
            for one, layout in stacked_gate_and_up.items()
        ),
    ),
)


# ---- StableLM --------------------------------------------------------------------------------------------------------


def _read_stablelm(reader: ConfigReader) -> dict[str, Any]:
    positions, share = reader.get("max_position_embeddings", 4096), reader.get("partial_rotary_factor", 0.25)
    bias, parallel = reader.get("use_qkv_bias", False), reader.get("use_parallel_residual", False)
    normed = reader.get("qk_layernorm", False)
    for name, value in (("use_qkv_bias", bias), ("use_parallel_residual", parallel), ("qk_layernorm", normed)):
        if type(value) is not bool:
            reader.problem(name, f"is {str(value)[:20]!r}, not true or false")
    return (
        read_rope(reader, positions if type(positions) is int else 1, share=share)
        | read_tied(reader, default=False)
        | {
            "disable_bias_linear": True,
            "add_qkv_bias": bias is True,
            "parallel_residual": parallel is True,
            "shared_parallel_norm": parallel is True,
            "qk_layernorm": normed is True,
            "qk_layernorm_per_head": normed is True,
        }
    )


def _write_stablelm(config: ResolvedModel) -> dict[str, Any]:
    values = {"use_qkv_bias": config.qkv_bias, "use_parallel_residual": config.parallel_residual}
    values["qk_layernorm"] = config.qk_layernorm_per_head
    return write_rope(config, share=True) | write_tied(config) | values


def _norms_of_heads(ours: str, theirs: str, heads: Callable[[ResolvedModel], int]) -> TensorRule:
    """The weights of the norms of all heads, which are tensors of their own."""
    layout = Layout(
        lambda config: (config.head_size,) * heads(config),
        lambda config: (Run(source=head, start=0, stop=config.head_size) for head in range(heads(config))),
    )
    name = f"model.layers.{{i}}.self_attn.{theirs}_layernorm.norms.{{e}}.weight"
    return TensorRule(f"blocks.{{i}}.attention.{ours}_norm.weight", (name,), layout)


STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    prefix="model.",
    same=(
        *same_fields(
            groups=32,
            positions=4096,
            inner=6912,
            vocabulary=50304,
            head=None,
            hidden=2560,
            epsilon=1e-5,
            epsilon_name="layer_norm_eps",
        ),
        Same("hidden_dropout", ("hidden_dropout",), 0.0),
    ),
    fixed={"hidden_act": (("silu", "swish"), "silu")},
    constants={"activation": "swiglu"},
    read=_read_stablelm,
    write=_write_stablelm,
    rules=(
        *block_rules(qkv_bias=True, norm_bias=True),
        _norms_of_heads("query", "q", lambda config: config.num_attention_heads),
        _norms_of_heads("key", "k", lambda config: config.query_groups),
    ),
    buffers=(".rotary_emb.inv_freq",),
    ties={"lm_head.weight": "model.embed_tokens.weight"},
)


# ---- StarCoder2 ------------------------------------------------------------------------------------------------------


def _read_starcoder2(reader: ConfigReader) -> dict[str, Any]:
    dropout, bias = reader.get("residual_dropout", 0.0), reader.get("use_bias", True)
    reader.only("layer_types", (None,))
    if type(bias) is not bool:
        reader.problem("use_bias", f"is {str(bias)[:20]!r}, not true or false")
    return read_common(reader, tied=True) | {
        "disable_bias_linear": bias is False,
        "window_size": window_of(reader, default=None),
        "hidden_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
    }


def _write_starcoder2(config: ResolvedModel) -> dict[str, Any]:
    return (
        write_rope(config)
        | write_tied(config)
        | {
            "use_bias": not config.disable_bias_linear,
            "sliding_window": config.window_size,
            "residual_dropout": config.hidden_dropout,
        }
    )


STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    prefix="model.",
    same=same_fields(
        groups=2,
        positions=4096,
        inner=12288,
        vocabulary=49152,
        head=None,
        layers=30,
        hidden=3072,
        heads=24,
        epsilon=1e-5,
        epsilon_name="norm_epsilon",
        std=0.018042,
    ),
    fixed={"hidden_act": (("gelu_pytorch_tanh", "gelu_new"), "gelu_pytorch_tanh")},
    optional={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    ignored=frozenset(("embedding_dropout",)),
    read=_read_starcoder2,
    write=_write_starcoder2,
    rules=block_rules(biases=True, norm_bias=True, mlp={"up": "c_fc", "down": "c_proj"}),
    buffers=(".rotary_emb.inv_freq",),
    ties={"lm_head.weight": "model.embed_tokens.weight"},
)
"""Not gated, unlike its relatives: GELU between two matrices."""
