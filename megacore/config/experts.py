"""The section of mixtures of experts (docs/guides/moe.md): how many, how tokens choose them, and what balances them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from megacore.config.fields import Flag, Range, Section, field_infos
from megacore.config.problem import Change, Problem, divisors_of
from megacore.config.rules import AtMost, Divides, Needs, Rule, Settings, rows, use

_EXPERTS = Needs("num_experts")


def _groups(c: Settings) -> Iterator[str]:
    """How many groups of experts a token chooses, and how many experts these have."""
    experts, groups, chosen = c.num_experts, c.moe_router_num_groups, c.moe_router_group_topk
    if experts is None or groups is None:
        return
    if chosen is None:
        yield f"--moe-router-num-groups {groups} needs --moe-router-num-groups topk: use 1 to {groups}"
    elif chosen > groups or experts % groups:
        return  # another rule says it
    elif c.moe_router_group_best is None and c.moe_router_topk % chosen:
        yield Problem(
            f"--moe-router-num-groups topk={chosen} must divide --moe-router-topk {c.moe_router_topk}",
            divisors_of("moe_router_group_topk", chosen, c.moe_router_topk, bare=True),
            Change("--moe-router-num-groups best"),
        )
    elif c.moe_router_group_best is not None and c.moe_router_group_best > experts // groups:
        yield (
            f"--moe-router-num-groups best={c.moe_router_group_best} is more than the {experts // groups} "
            f"experts of a group: use {experts // groups} or less"
        )
    elif c.moe_router_topk > experts // groups * chosen:
        least = -(-c.moe_router_topk // (experts // groups))
        yield Problem(
            f"--moe-router-topk {c.moe_router_topk} is more than the {experts // groups * chosen} experts of "
            f"{chosen} of {groups} groups",
            use("moe_router_group_topk", least),
            Change("fewer groups"),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Section):
    """Mixture of experts: its layers, its router and its losses (docs/guides/moe.md)."""

    rules: ClassVar[Sequence[Rule]] = (
        AtMost("moe_router_topk", "num_experts"),
        *rows("experts"),
        Divides("moe_router_num_groups", "num_experts", multiple=False),
        AtMost("moe_router_group_topk", "moe_router_num_groups"),
        _groups,
    )

    num_experts: Annotated[int | None, Range(2, 100_000), Flag(example=8)] = None
    """Replaces the feed-forward layer by this many experts. A multiple of --ep. Default: no experts."""
    moe_router_topk: Annotated[int, Range(1, 100_000), _EXPERTS] = 2
    """Experts that each token uses. At most --num-experts."""
    moe_router_score_function: Annotated[Literal["softmax", "sigmoid"], _EXPERTS] = "softmax"
    """How logits become scores. softmax: over all experts, as in Mixtral. sigmoid: each expert by itself, as in
    DeepSeek-V3."""
    moe_router_pre_softmax: Annotated[bool, Needs("num_experts", moe_router_score_function="softmax")] = False
    """Weighs the chosen experts by their softmax over all experts, as in OLMoE (norm_topk_prob false in transformers).
    Off: these weights are divided by their sum."""
    moe_router_num_groups: Annotated[int | None, Range(2, 100_000), Flag(example=4), _EXPERTS] = None
    """Groups of experts, as in DeepSeek-V3: a token uses at most topk of them. Divides --num-experts.
    Default: no groups."""
    moe_router_group_topk: Annotated[int | None, Range(1, 100_000)] = None
    """Groups that a token's experts come from: those whose best scores have the highest sum.
    Default: none; --moe-router-num-groups requires it."""
    moe_router_group_best: Annotated[int | None, Range(1, 100_000)] = None
    """Best scores of a group that are summed for the choice of groups: 1 in DeepSeek-V2, 2 in V3. Default:
    --moe-router-topk / topk."""
    moe_router_topk_scaling_factor: Annotated[float, Range(above=0), _EXPERTS] = 1.0
    """Multiplies the weights of the chosen experts (routed_scaling_factor in transformers)."""
    moe_router_enable_expert_bias: Annotated[bool, _EXPERTS] = False
    """Balances experts without a loss: a bias, used only to choose, rises for each expert with few tokens and falls for
    each with many."""
    moe_router_bias_update_rate: Annotated[float, Range(above=0)] = 1e-3
    """Change of an expert's bias per step."""
    moe_ffn_hidden_size: Annotated[int | None, Range(1, 10_000_000), _EXPERTS] = None
    """Inner width of an expert. A multiple of --etp. Default: --ffn-hidden-size."""
    moe_shared_expert_size: Annotated[
        int | None, Range(1, 10_000_000), Flag(("--moe-shared-expert-intermediate-size",), example=1024), _EXPERTS
    ] = None
    """Inner width of an expert that every token uses. A multiple of --tp. Default: no shared expert."""
    moe_shared_expert_gate: bool = False
    """Multiplies the shared expert's output by the sigmoid of a projection of the token, as in Qwen2-MoE."""
    moe_linear_bias: bool = False
    """Gives the router and the matrices of experts biases, as in GPT-OSS."""
    moe_layer_freq: Annotated[int, Range(1, 10_000), Flag(example=2), _EXPERTS] = 1
    """Every Nth block has experts, after the first ones without."""
    moe_first_dense_layers: Annotated[int, Range(0, 10_000), _EXPERTS] = 0
    """First blocks without experts."""
    moe_router_load_balancing_type: Annotated[
        Literal["seq_aux_loss", "global_aux_loss"], Needs("moe_aux_loss_coeff")
    ] = "seq_aux_loss"
    """What --moe-aux-loss-coeff balances. seq_aux_loss: each sequence. global_aux_loss: the batch, with counts of the
    previous step."""
    moe_aux_loss_coeff: Annotated[float, Range(0), Flag(example=0.01), _EXPERTS] = 0.0
    """Factor of the balancing loss of each layer. The reported loss leaves it out."""
    moe_z_loss_coeff: Annotated[float, Range(0), _EXPERTS] = 0.0
    """Factor of the router's z-loss, which keeps its logits small."""
    moe_input_jitter_eps: Annotated[float, Range(0, below=1), _EXPERTS] = 0.0
    """In training, multiplies the router's input by random numbers between 1 - N and 1 + N."""
    moe_expert_capacity_factor: Annotated[float | None, Range(above=0), Flag(example=1.25), _EXPERTS] = None
    """In training, limits each expert to N times its equal share of a sequence's tokens, and drops further tokens.
    Default: no limit."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens that an expert with a capacity keeps. probs: those with the largest weights. position: the first ones."""

    def holds(self, block: int) -> bool:
        """Whether a block, numbered from 0, has experts."""
        after = block - self.moe_first_dense_layers
        return self.num_experts is not None and after >= 0 and after % self.moe_layer_freq == 0

    def resolve(self, ffn_hidden_size: int) -> ResolvedExperts | None:
        """This section with every size filled in; None without experts. `ffn_hidden_size` is an expert's where none is
        given."""
        if self.num_experts is None:
            return None
        return self.resolved_as(ResolvedExperts, moe_ffn_hidden_size=self.moe_ffn_hidden_size or ffn_hidden_size)


@dataclass(frozen=True, kw_only=True)
class ResolvedExperts(ExpertsConfig):
    """The experts of a model whose sizes are all known: what `ExpertsConfig.resolve` returns."""

    num_experts: int = field()
    moe_ffn_hidden_size: int = field()

    @property
    def group_best(self) -> int:
        """How many of a group's best scores count, where there are groups."""
        return self.moe_router_group_best or self.moe_router_topk // (self.moe_router_group_topk or 1)

    @property
    def active_inner_size(self) -> int:
        """Inner width that a token passes through: of its experts and the shared one together."""
        return self.moe_router_topk * self.moe_ffn_hidden_size + (self.moe_shared_expert_size or 0)

    @property
    def uses_last_loads(self) -> bool:
        """Whether a loss goes by how often each expert was chosen in the step before."""
        return self.moe_router_load_balancing_type == "global_aux_loss" and self.moe_aux_loss_coeff > 0


_OF_TRAINING = (
    "moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_router_bias_update_rate",
    "moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_token_drop_policy",
)  # fmt: skip
ARCHITECTURE_OF_EXPERTS = tuple(name for name in field_infos(ExpertsConfig) if name not in _OF_TRAINING)
"""The fields that change what a model computes, and not only how it is trained."""


def differing_experts(one: ExpertsConfig | None, other: ExpertsConfig | None) -> list[str]:
    """The fields in which the experts of two models, or None, compute different functions."""
    one, other = one or ExpertsConfig(), other or ExpertsConfig()
    return [name for name in ARCHITECTURE_OF_EXPERTS if getattr(one, name) != getattr(other, name)]
