"""DeepSeek's latent attention and groups of experts, and OLMoE's heads: what a mixture has beside rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.rows import ReadOnly


class HeadsAsWideAsHiddenSize(ReadOnly):
    """The norms of queries and keys are as wide as hidden_size, and so are all heads together."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        head, heads = reader.get("head_dim"), ours["num_attention_heads"]
        if head is not None and heads > 0 and head != ours["hidden_size"] // heads:
            reader.problem("head_dim", f"is {head}, but the norms of this family are as wide as hidden_size")
        return {}


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of heads that follow from others, and the width of all shared experts together."""

    shared_experts: int  # default of their number
    key_heads: int | None = None  # default of the number of key heads, which is that of heads; None: that

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        rotated = ours["qk_rope_head_dim"]
        reader.only("num_key_value_heads", (ours["num_attention_heads"], None), self.key_heads)
        reader.only("head_dim", (rotated, None), None)
        reader.only("qk_head_dim", (ours["qk_nope_head_dim"] + rotated, None), None)
        if ours["norm_epsilon"] != 1e-6:
            reader.problem("rms_norm_eps", "is not 1e-06, which the norms of this family's short vectors always have")
        experts, size = reader.get("n_shared_experts", self.shared_experts), ours["moe_ffn_hidden_size"]
        if type(experts) is not int or experts < 1:
            reader.problem("n_shared_experts", f"is {str(experts)[:40]!r}: this family has one or more")
            experts = 1
        return {"moe_shared_expert_size": None if size is None else experts * size}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        assert config.experts is not None
        shared = config.experts.moe_shared_expert_size or 0
        return {
            "num_key_value_heads": config.num_attention_heads,
            "head_dim": config.qk_rope_head_dim,
            # A part of an expert is no number of experts: reading it back shows it.
            "n_shared_experts": shared // config.experts.moe_ffn_hidden_size,
        }


class ExpertBlocks(ReadOnly):
    """GPT-OSS's: the matrices of experts may be stored in MXFP4, and are read as bf16."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        stored = reader.get("quantization_config")
        if stored is not None and (not isinstance(stored, dict) or stored.get("quant_method") != "mxfp4"):
            reader.problem("quantization_config", f"is {str(stored)[:40]!r}, but megacore has only mxfp4 and null")
        return {}


def _read_groups(reader: ConfigReader, *, groups: int | None, chosen: int | None, best: int | None) -> dict[str, Any]:
    """The groups of experts, of which one alone is as good as none."""
    number, used = reader.get("n_group", groups), reader.get("topk_group", chosen)
    if type(number) is not int or type(used) is not int:
        reader.problem("n_group", f"is {str(number)[:40]!r}, and topk_group {str(used)[:40]!r}, not whole numbers")
        return {}
    if number == 1:
        return {}
    return {"moe_router_num_groups": number, "moe_router_group_topk": used, "moe_router_group_best": best}


class GreedyGroupsOfExperts:
    """DeepSeek-V2's: the best score of a group counts; without groups the fields mean nothing."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        reader.only("norm_topk_prob", (False, None), False)
        method = reader.get("topk_method", "greedy")
        if method == "group_limited_greedy":
            return _read_groups(reader, groups=None, chosen=None, best=1)
        if method != "greedy":
            reader.problem("topk_method", f"is {str(method)[:40]!r}, but megacore has greedy and group_limited_greedy")
            return {}
        for name in ("n_group", "topk_group"):
            reader.get(name)  # which nothing reads
        return {}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        experts = config.experts
        assert experts is not None
        if experts.moe_router_num_groups is None:
            return {"topk_method": "greedy", "norm_topk_prob": False}
        groups = {"n_group": experts.moe_router_num_groups, "topk_group": experts.moe_router_group_topk}
        return {"topk_method": "group_limited_greedy", "norm_topk_prob": False, **groups}


class GroupsOfExperts:
    """DeepSeek-V3's: the two best scores of a group count."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        if ours["moe_router_topk"] == 1:  # its weight, divided by itself, would be 1 instead of its score
            reader.problem(
                "num_experts_per_tok", "is 1, of which this family makes the weight 1, and megacore the score"
            )
        return _read_groups(reader, groups=8, chosen=4, best=2)

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        experts = config.experts
        assert experts is not None
        return {"n_group": experts.moe_router_num_groups or 1, "topk_group": experts.moe_router_group_topk or 1}
