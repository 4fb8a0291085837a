"""A mixture of experts in place of a block's MLP: a router chooses some of many MLPs for each token (Shazeer et al.
2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961).

The router computes in fp32. Nothing depends on which other sequences are in the microbatch. No token is dropped, unless
experts have a capacity (Lepikhin et al. 2020, arXiv 2006.16668, section 2.2): then a sequence is the unit, and not a
microbatch or what a rank holds, so that neither the micro-batch size nor any layout changes which choices are dropped.
How tokens reach the ranks that hold their experts is in parallel/experts.py.

Shape legend: b micro-batch, s positions on this rank, S positions of the sequence, h hidden size, E experts, k experts
that a token uses, f inner width of an expert, r rows of this rank's experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from megacore.config import ResolvedExperts, ResolvedModel
from megacore.layers.activations import ACTIVATION_FUNCTIONS
from megacore.layers.block import build_mlp
from megacore.layers.context import BuildContext
from megacore.ops.grouped import RowGroups
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.collectives import all_gather, all_reduce_, copy_to_group, reduce_from_group
from megacore.parallel.experts import (
    Assignment,
    GroupedLinear,
    assign,
    combine,
    dispatch,
    occurrences,
    with_loss,
)
from megacore.parallel.mesh import ALONE
from megacore.parallel.recompute import computed_again
from megacore.parallel.sequence import gather_sequence, local_positions, reduce_scatter_sequence
from megacore.parallel.sharding import ShardedModule, replicated, separate_term


class Choice(NamedTuple):
    """The experts of every token."""

    indices: Tensor  # [b, s, k] int64, ascending
    weights: Tensor  # [b, s, k] fp32, of what they give
    shares: Tensor  # [b, s, E] fp32, of the scores in a token's sum of them
    # Scalar fp32, by how much the scores of chosen experts, or of their groups, exceed those of the others at least;
    # infinite where there are none. None: the choice was not made here.
    gap: Tensor | None = None


def choose(
    logits: Tensor,
    experts: ResolvedExperts,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    blocks: Blocks = ONE_BLOCK,
) -> Choice:
    """The k experts with the highest scores, of equal ones the first.

    Args:
        logits: [b, s, E] fp32.
        experts: says what scores and weights are.
        bias: [E] fp32, added to the scores by which experts are chosen; None: there is none.
        chosen: [b, s, k], the experts if they are chosen already.
        blocks: of positions, in which scores are computed.
    """
    is_softmax = experts.moe_router_score_function == "softmax"
    scores, gap = logits.softmax(-1) if is_softmax else blocks.over_positions(torch.sigmoid, [logits], []), None
    if chosen is None:
        chosen, gap = _best(scores.detach() if bias is None else scores.detach() + bias, experts)
    weights = scores.gather(-1, chosen)
    if is_softmax and not experts.moe_router_pre_softmax:
        weights = weights / weights.sum(-1, keepdim=True)
    elif not is_softmax and experts.moe_router_topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * experts.moe_router_topk_scaling_factor
    shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
    return Choice(chosen, weights, shares, gap)


def _best(preferred: Tensor, experts: ResolvedExperts) -> tuple[Tensor, Tensor]:
    """The indices of the k experts with the highest numbers, ascending, and the gap as in `Choice`."""
    of_groups = None
    if experts.moe_router_num_groups is not None:
        allowed, of_groups = _in_best_groups(preferred, experts)
        preferred = preferred.masked_fill(~allowed, -torch.inf)
    indices, gap = _highest(preferred, experts.moe_router_topk)
    return indices.sort(-1).values, gap if of_groups is None else torch.minimum(of_groups, gap)


def _highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the highest values along the last dimension, of equal ones the first; and the least gap to the next
    value."""
    found, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    if count == values.shape[-1]:
        return indices, values.new_full((), torch.inf)
    return indices[..., :count], (found[..., count - 1] - found[..., count]).amin()


def _in_best_groups(scores: Tensor, experts: ResolvedExperts) -> tuple[Tensor, Tensor]:
    """[..., E] bool, whether an expert is in one of the groups that a token may use (DeepSeek-AI 2024, arXiv
    2412.19437, section 2.1.2), and the gap between these groups and the others."""
    groups, allowed = experts.moe_router_num_groups, experts.moe_router_group_topk
    assert groups is not None and allowed is not None
    grouped = scores.unflatten(-1, (groups, -1))  # [..., groups, experts of it]
    best = grouped.sort(-1, descending=True).values[..., : experts.group_best].sum(-1)
    indices, gap = _highest(best, allowed)
    of_group = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, indices, True)
    return of_group.unsqueeze(-1).expand_as(grouped).flatten(-2), gap


def capacity_of(experts: ResolvedExperts, length: int) -> int:
    """How many tokens of a sequence an expert takes: the capacity factor times the mean."""
    assert experts.moe_expert_capacity_factor is not None
    factor = Fraction(str(experts.moe_expert_capacity_factor))  # as it was written: rounded products end above integers
    return math.ceil(factor * experts.moe_router_topk * length / experts.num_experts)


def beyond_capacity(indices: Tensor, weights: Tensor, experts: ResolvedExperts, capacity: int) -> tuple[Tensor, Tensor]:
    """Which choices are dropped: an expert takes those with the largest weights, of equal ones the first, or those that
    come first. Returns [b, S, k] bool; and by how much the smallest weight that a full expert takes exceeds the largest
    that it drops, at least, a scalar: infinite where none drops a choice, or drops by position.

    Args:
        indices: [b, S, k] int64, the experts of all tokens of each sequence; E for padding, which takes no place.
        weights: [b, S, k], of the choices.
        experts: says which of the two.
        capacity: of each expert, in tokens of a sequence.
    """
    flat = indices.flatten(1)  # [b, S k], in the order of positions
    if experts.moe_token_drop_policy == "probs":
        by_weight = torch.sort(weights.flatten(1), dim=1, descending=True, stable=True).indices
        order = by_weight.gather(1, torch.sort(flat.gather(1, by_weight), dim=1, stable=True).indices)
    else:
        order = torch.sort(flat, dim=1, stable=True).indices
    ordered = flat.gather(1, order)  # by expert
    counts = flat.new_zeros(len(flat), experts.num_experts + 1).scatter_add_(1, flat, torch.ones_like(flat))
    first = counts.cumsum(1) - counts  # of each expert
    number = torch.arange(flat.shape[1], device=flat.device) - first.gather(1, ordered)
    dropped = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order, number >= capacity)
    gap = weights.new_full((), torch.inf)
    if experts.moe_token_drop_policy == "probs":
        by_order = weights.flatten(1).gather(1, order)
        is_first_dropped = (number == capacity) & (ordered < experts.num_experts)
        steps = (by_order[:, :-1] - by_order[:, 1:]).masked_fill(~is_first_dropped[:, 1:], torch.inf)
        gap = steps.amin()
    return dropped.view_as(indices), gap


class Router(ShardedModule):
    """h -> E logits, computed in fp32. `hidden_size`: h. `blocks`: where sums over positions are cut."""

    # [E + 2] int64, how often each expert was chosen on this rank in the forwards of this step, how many choices
    # padding would have, and how many were dropped.
    counts: Tensor
    gap: Tensor  # scalar fp32, the smallest `Route.gap` of these forwards
    bias: Tensor | None  # [E] fp32, what moves the choice; None: nothing does
    # [E] int64, how often each expert was chosen in the last step, on all ranks, for a loss that goes by it; 0 before
    # the first step. None: there is no such loss.
    loads: Tensor | None

    def __init__(
        self, hidden_size: int, experts: ResolvedExperts, *, device: torch.device, blocks: Blocks = ONE_BLOCK
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.weight = replicated(experts.num_experts, hidden_size, device=device)
        self.logit_bias = replicated(experts.num_experts, device=device) if experts.moe_linear_bias else None
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        self.register_buffer("counts", zeros(experts.num_experts + 2), persistent=False)
        self.register_buffer("gap", torch.full((), torch.inf, device=device), persistent=False)
        has_bias = experts.moe_router_enable_expert_bias
        self.register_buffer("bias", torch.zeros(experts.num_experts, device=device) if has_bias else None)
        self.register_buffer("loads", zeros(experts.num_experts) if experts.uses_last_loads else None, persistent=False)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """[b, s, h] -> [b, s, E] fp32. `noise`: [b, s, h] fp32, by which x is multiplied; None: there is none."""
        wide = x.float() if noise is None else x.float() * noise
        return self.blocks.over_positions(_linear, [wide], [self.weight, self.logit_bias])

    def note(self, route: Route) -> None:
        self.counts.add_(route.counts)
        if route.gap is not None:
            torch.minimum(self.gap, route.gap, out=self.gap)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())


class SharedExpert(ShardedModule):
    """An MLP that every token uses, and a gate where the model has one."""

    def __init__(self, config: ResolvedModel, experts: ResolvedExperts, context: BuildContext) -> None:
        super().__init__()
        assert experts.moe_shared_expert_size is not None
        self.mlp = build_mlp(dataclasses.replace(config, ffn_hidden_size=experts.moe_shared_expert_size), context)
        self.gate = replicated(1, config.hidden_size, device=context.device) if experts.moe_shared_expert_gate else None
        self.blocks = context.blocks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        if self.gate is None:
            return y
        return y * self.blocks.over_positions(lambda part, weight: F.linear(part, weight).sigmoid(), [x], [self.gate])


class Experts(nn.Module):
    """This rank's experts: MLPs h -> f -> h with stacked weights."""

    def __init__(self, config: ResolvedModel, experts: ResolvedExperts, context: BuildContext) -> None:
        super().__init__()
        h, f = config.hidden_size, experts.moe_ffn_hidden_size
        linear = partial(
            GroupedLinear,
            experts.num_experts,
            ranks=context.experts,
            bias=experts.moe_linear_bias,
            products=context.products,
            device=context.device,
        )
        # Of a tensor whose size is no multiple of a processor's vectors, its last elements may round otherwise.
        self.activates_apart, self.blocks = context.experts.apart, context.expert_blocks
        self.activation = config.activation
        # ReLU keeps its output itself.
        self.light = context.recompute_light and config.activation != "relu"
        self.gate = linear(h, f, split=1) if config.gated else None
        self.up = linear(h, f, split=1)
        self.down = linear(f, h, split=2)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """[r, h] -> [r, h], a part of the sum where ranks split the experts, unless blocks add the parts"""
        groups = RowGroups(counts)
        projected = [linear(rows, groups) for linear in (self.gate, self.up) if linear is not None]
        inner = self._activated(projected, counts)
        again = partial(self._activated, projected, counts)
        with computed_again(inner, again) if self.light else nullcontext():
            output: Tensor = self.down(inner, groups)
        return output

    def _activated(self, projected: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """[r, f] of each projection -> [r, f]"""
        activate = ACTIVATION_FUNCTIONS[self.activation]
        if not self.activates_apart:
            return activate(*projected)
        of_experts = zip(*(x.split(list(counts)) for x in projected), strict=True)
        return torch.cat([self.blocks.of_features(activate, of_expert) for of_expert in of_experts])


class Route(NamedTuple):
    """Where the tokens of a forward go, which is decided once."""

    indices: Tensor  # [b, s, k] int64, the experts that they have chosen, ascending
    counted: Tensor  # the same, E for padding
    counts: Tensor  # [E + 2] int64, as of a `Router`
    sent: Tensor  # as `counted`, and E where the expert is full: the token is not sent to it
    assignment: Assignment  # what this rank sends and receives
    gap: Tensor | None  # as in `Choice`, or that of `beyond_capacity` where it is smaller


class MoE(nn.Module):
    """Router, experts, and a shared expert where the model has one.

    Without sequence parallelism every rank of the layer group has all tokens. Where these ranks split each expert, what
    they compute are parts of a sum, and so are the gradients of tokens and weights, which are summed. The router and
    its losses are computed alike on all of them, and summed on none. With sequence parallelism a rank routes its own
    positions, and gathers the others' only where it has a part of each expert. With canonical blocks the experts add up
    their parts before tokens do, so that all ranks have the same rows, and whole gradients of tokens and weights.

    `config`: of the block, with experts.
    """

    leaves_padding_out = True
    uncompiled = ("forward",)  # the number of rows differs in each forward

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.config, self.ranks, self.streams = experts, context.experts, context.streams
        self.sequence_parallel, self.sequence = context.sequence_parallel, context.sequence
        self.split = context.layer_group if context.sequence_parallel else ALONE
        # Ranks that hold other positions of the same sequences.
        self.positions = (self.split, context.sequence.group)
        self.router = Router(config.hidden_size, experts, device=context.device, blocks=context.blocks)
        self.blocks = context.blocks
        self.experts = Experts(config, experts, context)
        has_shared = experts.moe_shared_expert_size is not None
        self.shared = SharedExpert(config, experts, context) if has_shared else None

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """[b, s, h] -> [b, s, h]. `padding`: [b, S], 1 for padding, which uses no expert; None: there is none."""
        decided = self.streams.decided
        known: Route | None = None if decided is None else decided.get(self)
        logits = self.router(x, self._noise(x))
        indices = None if known is None else known.indices
        choice = choose(logits, self.config, self.router.bias, indices, self.blocks)
        route = self._route(choice, padding) if known is None else known
        if decided is not None:
            decided[self] = route
        weights = choice.weights
        if route.sent is not route.indices:
            weights = weights.masked_fill(route.sent == self.config.num_experts, 0.0)
        if self.training and torch.is_grad_enabled():
            self.router.note(route)
            weights = self._balanced(weights, logits, choice.shares, route, padding)
        output = self._routed(x, weights, route.assignment)
        return output if self.shared is None else output + self.shared(x)

    # ---- where tokens go

    @torch.no_grad()
    def _route(self, choice: Choice, padding: Tensor | None) -> Route:
        experts, indices = self.config.num_experts, choice.indices
        counted = indices if padding is None else indices.masked_fill(self._here(padding)[..., None] > 0, experts)
        counts, sent, gap = occurrences(counted, experts + 2), counted, choice.gap
        if self.training and self.config.moe_expert_capacity_factor is not None:
            capacity = capacity_of(self.config, self._length(indices))
            if capacity < self._length(indices):
                every, weights = self._whole(counted), self._whole(choice.weights)
                dropped, of_dropped = beyond_capacity(every, weights, self.config, capacity)
                sent = counted.masked_fill(self._here(dropped), experts)
                gap = of_dropped if gap is None else torch.minimum(gap, of_dropped)
                counts[-1] = (sent != counted).sum()
        if self.blocks.divide:
            gathered = self.blocks.shared(sent)
        else:
            gathered = gather_sequence(sent, self.ranks.layer) if self.sequence_parallel else sent
        assignment = assign(
            gathered.flatten(0, 1),
            experts,
            self.ranks.dispatch,
            counts=counts if gathered is counted else None,
            sends_all=sent is indices,
            apart=self.ranks.apart,
        )
        return Route(indices, counted, counts, sent, assignment, gap)

    def _routed(self, x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        layer, group, turns = self.ranks.layer, self.ranks.dispatch, self.ranks.turns
        if self.blocks.divide:
            x, weights = self.blocks.shared(x), self.blocks.shared(weights)
        elif self.sequence_parallel:
            x, weights = gather_sequence(x, layer), gather_sequence(weights, layer)
        else:
            x, weights = (copy_to_group(part, layer, in_place=True) for part in (x, weights))
        rows = self._computed(dispatch(x.flatten(0, 1), assignment, group, turns), assignment.counts)
        output = combine(rows, weights.flatten(0, 1), assignment, group, turns)
        if self.blocks.divide:
            return self.blocks.parted(output.view_as(x))
        if self.sequence_parallel:
            return reduce_scatter_sequence(output.view_as(x), layer)
        return reduce_from_group(output, layer, in_place=True).view_as(x)

    def _computed(self, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """What the experts give for the rows of all sources, or of each source apart: then every source's gradients of
        the weights are terms of their own."""
        if len(counts) == 1:
            output: Tensor = self.experts(rows, counts[0])
            return output
        outputs = []
        for number, (part, of_part) in enumerate(zip(rows.split([*map(sum, counts)]), counts, strict=True)):
            named = self.experts.named_parameters() if number else ()
            terms = {name: separate_term(parameter) for name, parameter in named}  # type: ignore[arg-type]
            outputs.append(functional_call(self.experts, terms, (part, of_part)))
        return torch.cat(outputs)

    # ---- positions

    def _length(self, x: Tensor) -> int:
        """S, of the sequences of which x has this rank's positions, [b, s, ...]."""
        return x.shape[1] * math.prod(group.size for group in self.positions)

    def _here(self, whole: Tensor) -> Tensor:
        """This rank's positions: [b, S, ...] -> [b, s, ...]"""
        local: Tensor = self.sequence.take(whole, 1)
        return local[:, local_positions(local.shape[1], self.split)]

    def _whole(self, x: Tensor) -> Tensor:
        """All positions: [b, s, k] of every rank -> [b, S, k]"""
        x = gather_sequence(x, self.split)
        group = self.sequence.group
        return x if group.size == 1 else self.sequence.put_together(all_gather(x, group), 1)

    def _noise(self, x: Tensor) -> Tensor | None:
        """[b, s, h] fp32 around 1, which multiplies the router's input (Fedus et al. 2021, section 2.3); None: no
        noise."""
        eps = self.config.moe_input_jitter_eps
        if not (eps and self.training):
            return None
        positions = self._here(torch.arange(self._length(x), device=x.device)[None])[0]
        site = self.router.weight.spec.name
        return self.streams.uniform(site, positions, samples=len(x), width=x.shape[2]).mul_(2.0 * eps).add_(1.0 - eps)

    # ---- losses

    def _balanced(
        self, weights: Tensor, logits: Tensor, shares: Tensor, route: Route, padding: Tensor | None
    ) -> Tensor:
        """The weights, with the losses of the router on their way. Each is a mean over the sequences of the global
        batch, of a mean over the tokens of a sequence: neither microbatches nor ranks change them. The losses of a
        sequence need its counts on all ranks that hold a part of it, which have no gradient."""
        config, losses = self.config, list[Tensor]()
        length: int | Tensor = self._length(weights)
        squares = logits.logsumexp(-1).square() if config.moe_z_loss_coeff else None
        if padding is not None:
            length = (padding == 0).sum(1, keepdim=True).clamp(min=1)  # [b, 1]
            is_token = self._here(padding) == 0
            shares = shares * is_token[..., None]
            squares = None if squares is None else squares * is_token
        if config.uses_last_loads:
            losses.append(config.moe_aux_loss_coeff * self._global_imbalance(shares, length))
        elif config.moe_aux_loss_coeff:
            losses.append(config.moe_aux_loss_coeff * self._imbalance(shares, route.counted, length))
        if squares is not None:
            sums = squares.sum() if isinstance(length, int) else squares.sum(1, keepdim=True)
            losses.append((config.moe_z_loss_coeff / length * sums).sum())
        if not losses:
            return weights
        scale = self.ranks.loss_scale.value / self.ranks.sequences
        return with_loss(weights, torch.stack(losses).sum(), scale)

    def _imbalance(self, shares: Tensor, counted: Tensor, length: int | Tensor) -> Tensor:
        """The sum over sequences of sum_e f_e P_e (DeepSeek-AI 2024, arXiv 2412.19437, equations 17 to 20), a scalar: f
        is the expert's part of the choices times E, P its mean share of the scores. 1 for each balanced sequence."""
        experts, chosen = self.config.num_experts, self.config.moe_router_topk
        counts = shares.new_zeros(len(counted), experts + 1)
        counts.scatter_add_(1, counted.flatten(1), torch.ones_like(counted, dtype=counts.dtype).flatten(1))
        for group in self.positions:
            all_reduce_(counts, group)
        return (counts[:, :experts] * (experts / (chosen * length)) * (shares.sum(1) / length)).sum()

    def _global_imbalance(self, shares: Tensor, length: int | Tensor) -> Tensor:
        """The same with the expert's part of the choices of the whole last step: of this one it is known only at its
        end, and would depend on the order of microbatches before. Without a last step f is 1, and the gradient 0."""
        assert self.router.loads is not None
        loads = self.router.loads.to(shares.dtype)
        total = loads.sum()
        f = torch.where(total > 0, loads * (self.config.num_experts / total), 1.0)
        return (f * (shares.sum(1) / length)).sum()
