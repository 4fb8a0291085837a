"""A mixture of experts in place of a block's MLP: a router chooses some of many MLPs for each token (Shazeer et al.
2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961).

The router computes in fp32. No token is dropped, and nothing depends on which other tokens are in the microbatch. How
tokens reach the ranks that hold their experts is in parallel/experts.py.

Shape legend: b micro-batch, s positions on this rank, h hidden size, E experts, k experts that a token uses, f inner
width of an expert, r rows of this rank's experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedExperts, ResolvedModel
from megacore.layers.block import MLP
from megacore.layers.context import BuildContext
from megacore.parallel.collectives import all_reduce_, copy_to_group, reduce_from_group
from megacore.parallel.experts import GroupedLinear, assign, combine, dispatch, occurrences, with_loss
from megacore.parallel.mesh import ALONE
from megacore.parallel.sharding import ShardedModule, replicated
from megacore.parallel.tensor import gather_sequence, reduce_scatter_sequence

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": ops.gelu,
    "gelu-exact": partial(ops.gelu, exact=True),
    "relu": torch.relu,
}
_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": ops.swiglu,
    "geglu": ops.geglu,
    "geglu-exact": partial(ops.geglu, exact=True),
}


class Choice(NamedTuple):
    """The experts of every token.

    Attributes:
        indices: [b, s, k] int64, ascending.
        weights: [b, s, k] fp32, of what they give.
        shares: [b, s, E] fp32, of the scores in a token's sum of them.
    """

    indices: Tensor
    weights: Tensor
    shares: Tensor


def choose(logits: Tensor, experts: ResolvedExperts, bias: Tensor | None = None) -> Choice:
    """The k experts with the highest scores, of equal ones the first.

    Args:
        logits: [b, s, E] fp32.
        experts: says what scores and weights are.
        bias: [E] fp32, added to the scores by which experts are chosen; None: there is none.
    """
    is_softmax = experts.moe_router_score_function == "softmax"
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    chosen = experts.moe_router_topk
    preferred = scores.detach() if bias is None else scores.detach() + bias
    if experts.moe_router_num_groups is not None:
        preferred = preferred.masked_fill(~_in_best_groups(preferred, experts), -torch.inf)
    indices = _highest(preferred, chosen).sort(-1).values
    weights = scores.gather(-1, indices)
    if is_softmax and not experts.moe_router_pre_softmax:
        weights = weights / weights.sum(-1, keepdim=True)
    elif not is_softmax and chosen > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * experts.moe_router_topk_scaling_factor
    shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
    return Choice(indices, weights, shares)


def _highest(values: Tensor, count: int) -> Tensor:
    """Indices of the highest values along the last dimension, of equal ones the first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(scores: Tensor, experts: ResolvedExperts) -> Tensor:
    """[..., E] bool, whether an expert is in one of the groups that a token may use (DeepSeek-AI 2024, arXiv
    2412.19437, section 2.1.2)."""
    groups, allowed = experts.moe_router_num_groups, experts.moe_router_group_topk
    assert groups is not None and allowed is not None
    grouped = scores.unflatten(-1, (groups, -1))  # [..., groups, experts of it]
    best = grouped.sort(-1, descending=True).values[..., : experts.moe_router_topk // allowed].sum(-1)
    of_group = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _highest(best, allowed), True)
    return of_group.unsqueeze(-1).expand_as(grouped).flatten(-2)


class Router(ShardedModule):
    """h -> E logits, computed in fp32.

    Args:
        hidden_size: h.
        experts: the section of the experts.
        device: where parameters live.

    Attributes:
        counts: [E] int64, how often each expert was chosen on this rank in the forwards of this step.
        bias: [E] fp32, what moves the choice; None: nothing does.
    """

    counts: Tensor
    bias: Tensor | None

    def __init__(self, hidden_size: int, experts: ResolvedExperts, *, device: torch.device) -> None:
        super().__init__()
        self.weight = replicated(experts.num_experts, hidden_size, device=device)
        counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("counts", counts, persistent=False)
        has_bias = experts.moe_router_enable_expert_bias
        self.register_buffer("bias", torch.zeros(experts.num_experts, device=device) if has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, E] fp32"""
        return F.linear(x.float(), self.weight.float())


class SharedExpert(ShardedModule):
    """An MLP that every token uses, and a gate where the model has one.

    Args:
        config: of the block.
        experts: its section, with a shared expert.
        context: groups, device and what else a layer is built with.
    """

    def __init__(self, config: ResolvedModel, experts: ResolvedExperts, context: BuildContext) -> None:
        super().__init__()
        assert experts.moe_shared_expert_size is not None
        self.mlp = MLP(dataclasses.replace(config, ffn_hidden_size=experts.moe_shared_expert_size), context)
        self.gate = replicated(1, config.hidden_size, device=context.device) if experts.moe_shared_expert_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        y: Tensor = self.mlp(x)
        return y if self.gate is None else y * F.linear(x, self.gate).sigmoid()


class Experts(nn.Module):
    """This rank's experts: MLPs h -> f -> h without biases, with stacked weights."""

    def __init__(self, config: ResolvedModel, experts: ResolvedExperts, context: BuildContext) -> None:
        super().__init__()
        h, f = config.hidden_size, experts.moe_ffn_hidden_size
        linear = partial(
            GroupedLinear,
            experts.num_experts,
            ranks=context.experts,
            products=context.products,
            device=context.device,
        )
        self.activation = config.activation
        self.gate = linear(h, f, split=1) if config.gated else None
        self.up = linear(h, f, split=1)
        self.down = linear(f, h, split=2)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """[r, h] -> [r, h], a part of the sum where ranks split the experts"""
        up = self.up(rows, counts)
        if self.gate is None:
            inner = _PLAIN[self.activation](up)
        else:
            inner = _GATED[self.activation](self.gate(rows, counts), up)
        output: Tensor = self.down(inner, counts)
        return output


class MoE(nn.Module):
    """Router, experts, and a shared expert where the model has one.

    Without sequence parallelism every rank of the layer group has all tokens. Where these ranks split each expert, what
    they compute are parts of a sum, and so are the gradients of tokens and weights, which are summed. The router and
    its losses are computed alike on all of them, and summed on none. With sequence parallelism a rank routes its own
    positions, and gathers the others' only where it has a part of each expert.

    Args:
        config: of the block, with experts.
        context: groups, device and what else a layer is built with.
    """

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.config, self.ranks = experts, context.experts
        self.sequence_parallel = context.sequence_parallel
        # Ranks that hold other positions of the same sequences.
        self.positions = (context.layer_group if context.sequence_parallel else ALONE, context.sequence.group)
        self.router = Router(config.hidden_size, experts, device=context.device)
        self.experts = Experts(config, experts, context)
        has_shared = experts.moe_shared_expert_size is not None
        self.shared = SharedExpert(config, experts, context) if has_shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        logits = self.router(x)
        indices, weights, shares = choose(logits, self.config, self.router.bias)
        if self.training and torch.is_grad_enabled():
            self.router.counts.add_(occurrences(indices, self.config.num_experts))
            weights = self._balanced(weights, logits, shares, indices)
        output = self._routed(x, indices, weights)
        return output if self.shared is None else output + self.shared(x)

    def _routed(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        layer, group = self.ranks.layer, self.ranks.dispatch
        if self.sequence_parallel:
            x, indices, weights = (gather_sequence(part, layer) for part in (x, indices, weights))
        else:
            x, weights = (copy_to_group(part, layer, in_place=True) for part in (x, weights))
        assignment = assign(indices.flatten(0, 1), self.config.num_experts, group)
        rows = dispatch(x.flatten(0, 1), assignment, group)
        rows = self.experts(rows, assignment.counts)
        output = combine(rows, weights.flatten(0, 1), assignment, group)
        if self.sequence_parallel:
            return reduce_scatter_sequence(output.view_as(x), layer)
        return reduce_from_group(output, layer, in_place=True).view_as(x)

    def _balanced(self, weights: Tensor, logits: Tensor, shares: Tensor, indices: Tensor) -> Tensor:
        """The weights, with the losses of the router on their way.

        Both are sums over the global batch, divided by its sequences or tokens: neither microbatches nor ranks change
        them. The losses of a sequence need its counts on all ranks that hold a part of it, which have no gradient.
        """
        config, length = self.config, weights.shape[1] * math.prod(group.size for group in self.positions)
        losses = []
        if config.moe_aux_loss_coeff:
            losses.append(config.moe_aux_loss_coeff * self._imbalance(shares, indices, length))
        if config.moe_z_loss_coeff:
            losses.append(config.moe_z_loss_coeff / length * logits.logsumexp(-1).square().sum())
        if not losses:
            return weights
        scale = self.ranks.loss_scale.value / self.ranks.sequences
        return with_loss(weights, torch.stack(losses).sum(), scale)

    def _imbalance(self, shares: Tensor, indices: Tensor, length: int) -> Tensor:
        """The sum over sequences of sum_e f_e P_e (DeepSeek-AI 2024, arXiv 2412.19437, equations 17 to 20), a scalar: f
        is the expert's part of the choices times E, P its mean share of the scores. 1 for each balanced sequence."""
        experts, chosen = self.config.num_experts, self.config.moe_router_topk
        counts = shares.new_zeros(len(indices), experts)
        counts.scatter_add_(1, indices.flatten(1), torch.ones_like(indices, dtype=counts.dtype).flatten(1))
        for group in self.positions:
            all_reduce_(counts, group)
        return (counts * (experts / (chosen * length)) * (shares.sum(1) / length)).sum()
