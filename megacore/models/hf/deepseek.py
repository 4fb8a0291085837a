"""DeepSeek-V2 and V3: latent attention, and experts in all blocks but the first.

They rotate pairs of neighbouring dimensions, and megacore dimension i with i + r/2: the rows that make the rotated part
of queries and keys are stored in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Layout, Run, Same, TensorRule, neighbouring_pairs, write_tied
from megacore.models.hf.llama import read_common
from megacore.models.hf.rope import write_rope

# Of training, or of parts that transformers' model does not have.
_IGNORED = frozenset(
    (
        "output_router_logits", "aux_loss_alpha", "router_aux_loss_coef", "seq_aux", "ep_size", "num_mtp_layers",
        "num_nextn_predict_layers",
    )
)  # fmt: skip
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


# ---- config.json -----------------------------------------------------------------------------------------------------


def _same(*, router_names: tuple[str, ...], **defaults: Any) -> tuple[Same, ...]:
    """The fields that are copied; `defaults` by megacore's names."""
    names = {
        "num_layers": ("num_hidden_layers",),
        "hidden_size": ("hidden_size",),
        "num_attention_heads": ("num_attention_heads",),
        "ffn_hidden_size": ("intermediate_size",),
        "max_position_embeddings": ("max_position_embeddings",),
        "vocab_size": ("vocab_size",),
        "norm_epsilon": ("rms_norm_eps",),
        "init_method_std": ("initializer_range",),
        "attention_dropout": ("attention_dropout",),
        "q_lora_rank": ("q_lora_rank",),
        "kv_lora_rank": ("kv_lora_rank",),
        **{name: (name,) for name in _SIZES},
        "num_experts": ("n_routed_experts", *router_names),
        "moe_router_topk": ("num_experts_per_tok",),
        "moe_ffn_hidden_size": ("moe_intermediate_size",),
        "moe_first_dense_layers": ("first_k_dense_replace",),
        "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    }
    common = {
        "norm_epsilon": 1e-6, "init_method_std": 0.02, "attention_dropout": 0.0, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    return tuple(Same(ours, theirs, {**common, **defaults}[ours]) for ours, theirs in names.items())


def _read(reader: ConfigReader, *, heads: int | None, width: int, shared: int) -> dict[str, Any]:
    """What both versions have; the arguments are defaults of theirs, `heads` that of key heads."""
    number, rotated = reader.get("num_attention_heads", heads), reader.get("qk_rope_head_dim", 64)
    whole = reader.get("qk_nope_head_dim", 128)
    sizes: dict[str, tuple[Any, Any]] = {"head_dim": (rotated, None)}
    reader.only("num_key_value_heads", (number, None), heads)
    if type(whole) is int and type(rotated) is int:
        sizes["qk_head_dim"] = (whole + rotated, None)
    for name, allowed in sizes.items():
        reader.only(name, allowed, None)
    if reader.get("rms_norm_eps", 1e-6) != 1e-6:
        reader.problem("rms_norm_eps", "is not 1e-06, which the norms of this family's short vectors always have")
    size, experts = reader.get("moe_intermediate_size", width), reader.get("n_shared_experts", shared)
    if type(experts) is not int or experts < 1:
        reader.problem("n_shared_experts", f"is {str(experts)[:40]!r}: this family has one or more")
        experts = 1
    return read_common(reader) | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "disable_bias_linear": True,
        "moe_shared_expert_size": experts * size if type(size) is int else None,
    }


def _read_groups(reader: ConfigReader, *, groups: int | None, chosen: int | None, best: int | None) -> dict[str, Any]:
    """The groups of experts, of which one alone is as good as none.

    Args:
        reader: the file.
        groups: default of their number.
        chosen: default of how many a token may use.
        best: how many scores of a group count.
    """
    number, used = reader.get("n_group", groups), reader.get("topk_group", chosen)
    if type(number) is not int or type(used) is not int:
        reader.problem("n_group", f"is {str(number)[:40]!r}, and topk_group {str(used)[:40]!r}, not whole numbers")
        return {}
    if number == 1:
        return {}
    return {
        "moe_router_num_groups": number,
        "moe_router_group_topk": used,
        "moe_router_group_best": best,
    }


def _read_v2(reader: ConfigReader) -> dict[str, Any]:
    reader.only("norm_topk_prob", (False, None), False)
    method = reader.get("topk_method", "greedy")
    groups: dict[str, Any] = {}
    if method == "group_limited_greedy":
        groups = _read_groups(reader, groups=None, chosen=None, best=1)
    elif method != "greedy":
        reader.problem("topk_method", f"is {str(method)[:40]!r}, but megacore has greedy and group_limited_greedy")
    else:
        for name in ("n_group", "topk_group"):
            reader.get(name)  # which nothing reads
    return _read(reader, heads=None, width=1407, shared=2) | groups | {"moe_router_pre_softmax": True}


def _read_v3(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("num_experts_per_tok", 8) == 1:  # its weight, divided by itself, would be 1 instead of its score
        reader.problem("num_experts_per_tok", "is 1, of which this family makes the weight 1, and megacore the score")
    return (
        _read(reader, heads=128, width=2048, shared=1)
        | _read_groups(reader, groups=8, chosen=4, best=2)
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    )


def _write(config: ResolvedModel) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    shared = experts.moe_shared_expert_size or 0
    return (
        write_rope(config)
        | write_tied(config)
        | {
            "num_key_value_heads": config.num_attention_heads,
            "head_dim": config.qk_rope_head_dim,
            # A part of an expert is no number of experts: reading it back shows it.
            "n_shared_experts": shared // experts.moe_ffn_hidden_size,
        }
    )


def _write_v2(config: ResolvedModel) -> dict[str, Any]:
    assert config.experts is not None
    grouped = config.experts.moe_router_num_groups is not None
    values: dict[str, Any] = {"topk_method": "group_limited_greedy" if grouped else "greedy", "norm_topk_prob": False}
    if grouped:
        values |= {
            "n_group": config.experts.moe_router_num_groups,
            "topk_group": config.experts.moe_router_group_topk,
        }
    return _write(config) | values


def _write_v3(config: ResolvedModel) -> dict[str, Any]:
    assert config.experts is not None
    return _write(config) | {
        "n_group": config.experts.moe_router_num_groups or 1,
        "topk_group": config.experts.moe_router_group_topk or 1,
    }


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _query_runs(config: ResolvedModel) -> Iterator[Run]:
    for head in range(config.num_attention_heads):
        start = head * config.head_size
        yield Run(source=0, start=start, stop=start + config.qk_nope_head_dim)
        yield from neighbouring_pairs(start + config.qk_nope_head_dim, config.qk_rope_head_dim)


def _key_value_runs(config: ResolvedModel) -> Iterator[Run]:
    yield Run(source=0, start=0, stop=config.kv_lora_rank)
    yield from neighbouring_pairs(config.kv_lora_rank, config.qk_rope_head_dim)


_QUERIES = Layout(lambda config: (config.num_attention_heads * config.head_size,), _query_runs)
_KEYS_AND_VALUES = Layout(lambda config: (config.kv_lora_rank + config.qk_rope_head_dim,), _key_value_runs)


def _rules() -> Iterator[TensorRule]:
    ours, theirs = "blocks.{i}", "model.layers.{i}"
    attention = f"{theirs}.self_attn"
    yield TensorRule("embedding.tokens.weight", ("model.embed_tokens.weight",))
    yield TensorRule(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
    yield TensorRule(f"{ours}.attention.query.weight", (f"{attention}.q_proj.weight",), _QUERIES)
    yield TensorRule(f"{ours}.attention.query_up.weight", (f"{attention}.q_b_proj.weight",), _QUERIES)
    yield TensorRule(f"{ours}.attention.query_down.weight", (f"{attention}.q_a_proj.weight",))
    yield TensorRule(f"{ours}.attention.query_norm.weight", (f"{attention}.q_a_layernorm.weight",))
    yield TensorRule(f"{ours}.attention.key_value_norm.weight", (f"{attention}.kv_a_layernorm.weight",))
    yield TensorRule(f"{ours}.attention.key_value.weight", (f"{attention}.kv_b_proj.weight",))
    yield TensorRule(f"{ours}.attention.output.weight", (f"{attention}.o_proj.weight",))
    yield TensorRule(
        f"{ours}.attention.key_value_down.weight", (f"{attention}.kv_a_proj_with_mqa.weight",), _KEYS_AND_VALUES
    )
    yield TensorRule(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    for one in ("gate", "up", "down"):
        yield TensorRule(f"{ours}.mlp.{one}.weight", (f"{theirs}.mlp.{one}_proj.weight",))
        stacked = f"{theirs}.mlp.experts.{{e}}.{one}_proj.weight"
        yield TensorRule(f"{ours}.mlp.experts.{one}.weight", (stacked,))
        yield TensorRule(f"{ours}.mlp.shared.mlp.{one}.weight", (f"{theirs}.mlp.shared_experts.{one}_proj.weight",))
    yield TensorRule(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",))
    yield TensorRule(f"{ours}.mlp.router.bias", (f"{theirs}.mlp.gate.e_score_correction_bias",))
    yield TensorRule("head.norm.weight", ("model.norm.weight",))
    yield TensorRule("head.weight", ("lm_head.weight",))


def _family(model_type: str, architecture: str, **parts: Any) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        constants={"activation": "swiglu", "normalization": "RMSNorm", "hidden_dropout": 0.0},
        ignored=_IGNORED,
        rules=tuple(_rules()),
        buffers=(".rotary_emb.inv_freq",),
        ties={"lm_head.weight": "model.embed_tokens.weight"},
        **parts,
    )


_FIXED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "hidden_act": (("silu", "swish"), "silu"),
    "attention_bias": ((False,), False),
}
DEEPSEEK_V2 = _family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    same=_same(router_names=("num_experts",), num_layers=32, hidden_size=4096, num_attention_heads=32,
               ffn_hidden_size=11008, max_position_embeddings=2048, vocab_size=102400, num_experts=64,
               moe_router_topk=None, moe_ffn_hidden_size=1407, moe_first_dense_layers=0,
               moe_router_topk_scaling_factor=1.0),
    fixed={**_FIXED, "mlp_bias": ((False,), False)},
    optional={"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    read=_read_v2,
    write=_write_v2,
)  # fmt: skip
DEEPSEEK_V3 = _family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    same=_same(router_names=("num_local_experts",), num_layers=61, hidden_size=7168, num_attention_heads=128,
               ffn_hidden_size=18432, max_position_embeddings=4096, vocab_size=129280, num_experts=256,
               moe_router_topk=8, moe_ffn_hidden_size=2048, moe_first_dense_layers=3,
               moe_router_topk_scaling_factor=2.5),
    fixed={**_FIXED, "norm_topk_prob": ((True,), True), "rope_interleave": ((True,), True)},
    optional={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    read=_read_v3,
    write=_write_v3,
)  # fmt: skip
