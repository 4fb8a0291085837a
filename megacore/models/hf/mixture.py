"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: the blocks of Mistral, Qwen2 and Qwen3, with experts in place of the MLP.

On disk every expert has matrices of its own; megacore stacks those of all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Same, TensorRule, write_tied
from megacore.models.hf.llama import LLAMA, MISTRAL, QWEN2, QWEN3, read_common, window_of, write_window_of_qwen
from megacore.models.hf.rope import write_rope

# Training's, not the model's.
_TRAINING = frozenset(("output_router_logits", "router_aux_loss_coef"))


def _rules(dense: Family, block: str, router: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """The tensors of a family with an MLP, and of its block's experts in place of it.

    Args:
        dense: that family.
        block: where a block keeps router and experts.
        router: name of the router there.
        names: those of an expert's matrices, by megacore's.
    """
    ours, theirs = "blocks.{i}.mlp", f"model.layers.{{i}}.{block}"
    return (
        *(rule for rule in dense.rules if not rule.ours.startswith(f"{ours}.")),
        TensorRule(f"{ours}.router.weight", (f"{theirs}.{router}.weight",)),
        *(
            TensorRule(f"{ours}.experts.{one}.weight", (f"{theirs}.experts.{{e}}.{other}.weight",))
            for one, other in names.items()
        ),
    )


def _same(dense: Family, experts: tuple[str, ...], number: int, chosen: int, **defaults: Any) -> tuple[Same, ...]:
    """The copied fields of a family with an MLP, some with other defaults, and those of experts."""
    copied = (Same(one.ours, one.theirs, defaults.get(one.ours, one.default)) for one in dense.same)
    return (
        *copied,
        Same("num_experts", experts, number),
        Same("moe_router_topk", ("num_experts_per_tok",), chosen),
    )


def _family(dense: Family, model_type: str, architecture: str, **parts: Any) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix=dense.prefix,
        fixed={**dense.fixed, **parts.pop("fixed", {})},
        optional=dense.optional,
        constants=dense.constants,
        buffers=dense.buffers,
        ties=dense.ties,
        ignored=dense.ignored | _TRAINING,
        **parts,
    )


def _read_width(reader: ConfigReader, default: int) -> dict[str, Any]:
    """The inner width of experts, where every block has them and the field is that of MLPs."""
    width = reader.copied("ffn_hidden_size", ("intermediate_size",), default)
    return {"ffn_hidden_size": width, "moe_ffn_hidden_size": width}


def _write_width(config: ResolvedModel) -> dict[str, Any]:
    assert config.experts is not None
    return {"intermediate_size": config.experts.moe_ffn_hidden_size}


# ---- Mixtral ---------------------------------------------------------------------------------------------------------


def _read_mixtral(reader: ConfigReader) -> dict[str, Any]:
    reader.only("layer_types", (None,))
    return (
        read_common(reader, base=1_000_000.0)
        | _read_width(reader, 14336)
        | {"disable_bias_linear": True, "window_size": window_of(reader, default=None)}
    )


def _write_mixtral(config: ResolvedModel) -> dict[str, Any]:
    window = {"sliding_window": config.window_size}
    return write_rope(config) | write_tied(config) | window | _write_width(config)


MIXTRAL = _family(
    MISTRAL,
    "mixtral",
    "MixtralForCausalLM",
    same=tuple(
        one
        for one in _same(MISTRAL, ("num_local_experts", "num_experts"), 8, 2, norm_epsilon=1e-5)
        if one.ours != "ffn_hidden_size"
    ),
    fixed={"router_jitter_noise": ((0.0,), 0.0)},
    read=_read_mixtral,
    write=_write_mixtral,
    rules=_rules(MISTRAL, "block_sparse_moe", "gate", {"gate": "w1", "up": "w3", "down": "w2"}),
)


# ---- Qwen ------------------------------------------------------------------------------------------------------------

_PROJECTIONS = {one: f"{one}_proj" for one in ("gate", "up", "down")}
# Every block has experts.
_UNIFORM: dict[str, tuple[tuple[Any, ...], Any]] = {
    "decoder_sparse_step": ((1,), 1),
    "mlp_only_layers": (([], None), []),
}


def _normalised(reader: ConfigReader) -> dict[str, Any]:
    divides = reader.get("norm_topk_prob", False)
    if type(divides) is not bool:
        reader.problem("norm_topk_prob", f"is {divides!r}, not true or false")
    return {"moe_router_pre_softmax": not divides}


def _write_qwen(config: ResolvedModel) -> dict[str, Any]:
    assert config.experts is not None
    return (
        write_rope(config)
        | write_tied(config)
        | write_window_of_qwen(config)
        | {"norm_topk_prob": not config.experts.moe_router_pre_softmax}
    )


QWEN2_MOE = _family(
    QWEN2,
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    same=(
        *_same(QWEN2, ("num_experts", "num_local_experts"), 60, 4, num_layers=24, hidden_size=2048,
               num_attention_heads=16, num_query_groups=16, ffn_hidden_size=5632),
        Same("moe_ffn_hidden_size", ("moe_intermediate_size",), 1408),
        Same("moe_shared_expert_size", ("shared_expert_intermediate_size",), 5632),
    ),
    fixed={**_UNIFORM, "qkv_bias": ((True,), True)},
    read=lambda reader: QWEN2.read(reader) | _normalised(reader) | {"moe_shared_expert_gate": True},
    write=_write_qwen,
    rules=(
        *_rules(QWEN2, "mlp", "gate", _PROJECTIONS),
        *(
            TensorRule(
                f"blocks.{{i}}.mlp.shared.mlp.{one}.weight", (f"model.layers.{{i}}.mlp.shared_expert.{other}.weight",)
            )
            for one, other in _PROJECTIONS.items()
        ),
        TensorRule("blocks.{i}.mlp.shared.gate", ("model.layers.{i}.mlp.shared_expert_gate.weight",)),
    ),
)  # fmt: skip
QWEN3_MOE = _family(
    QWEN3,
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    same=(
        *_same(QWEN3, ("num_experts", "num_local_experts"), 128, 8, num_layers=24, hidden_size=2048,
               num_query_groups=4, ffn_hidden_size=6144, kv_channels=None),
        Same("moe_ffn_hidden_size", ("moe_intermediate_size",), 768),
    ),
    fixed=_UNIFORM,
    read=lambda reader: QWEN3.read(reader) | _normalised(reader),
    write=_write_qwen,
    rules=_rules(QWEN3, "mlp", "gate", _PROJECTIONS),
)  # fmt: skip


# ---- OLMoE -----------------------------------------------------------------------------------------------------------


def _read_olmoe(reader: ConfigReader) -> dict[str, Any]:
    hidden, heads, head = (reader.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if head is not None and head != hidden // heads:
        reader.problem("head_dim", f"is {head}, but the norms of this family are as wide as hidden_size")
    return (
        read_common(reader)
        | _read_width(reader, 2048)
        | _normalised(reader)
        | {"disable_bias_linear": True, "qk_layernorm": True, "qk_layernorm_all_heads": True}
    )


def _write_olmoe(config: ResolvedModel) -> dict[str, Any]:
    assert config.experts is not None
    return (
        write_rope(config)
        | write_tied(config)
        | _write_width(config)
        | {"norm_topk_prob": not config.experts.moe_router_pre_softmax}
    )


OLMOE = _family(
    LLAMA,
    "olmoe",
    "OlmoeForCausalLM",
    same=(
        *(
            one
            for one in _same(LLAMA, ("num_experts", "num_local_experts"), 64, 8, num_layers=16, hidden_size=2048,
                             num_attention_heads=16, max_position_embeddings=4096, vocab_size=50304, norm_epsilon=1e-5)
            if one.ours not in ("ffn_hidden_size", "kv_channels")
        ),
        Same("clip_qkv", ("clip_qkv",), None),
    ),
    fixed={"attention_bias": ((False,), False)},
    read=_read_olmoe,
    write=_write_olmoe,
    rules=_rules(QWEN3, "mlp", "gate", _PROJECTIONS),
)  # fmt: skip
