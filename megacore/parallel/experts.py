"""Expert parallelism: which rank computes which expert, and how the tokens travel there and back.

The ranks of a group hold different experts of a layer (Lepikhin et al. 2020, arXiv 2006.16668). Each sends every other
one the rows of the tokens that use its experts, as many as there are: nothing is padded. A rank computes the rows of an
expert together, in the order of their source and then of their token, and sends the results back. The rank of the token
adds them up in fp32, in ascending order of experts: the order of a sum does not depend on the layout.

A choice may be left out: padding, and tokens beyond the capacity of an expert, are sent nowhere and get 0 from it.

Every exchange has its reverse as backward, so that the pairs are adjoint like the other collectives. A rank that
receives no row takes part in all of them, and its weights get gradients of zero.

Shape legend: t tokens, k experts that a token uses, E experts, r rows of this rank's experts, i input features, o
output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import Node
from megacore.ops.grouped import (
    Implementation,
    RowGroups,
    add_grouped_weight_gradients,
    combine_rows,
    gather_rows,
    grouped_implementation,
    grouped_products,
    grouped_weight_gradients,
    spread_rows,
)
from megacore.parallel.collectives import PartsExchanged, RowsExchanged
from megacore.parallel.mesh import ALONE, Group, Mesh
from megacore.parallel.products import Products, TorchProducts
from megacore.parallel.sharding import ShardedModule, ShardedParameter, ShardSpec, split_evenly
from megacore.parallel.turns import Turns


@dataclass
class LossScale:
    """What the losses that layers add are multiplied by, like the loss of the step: that of fp16, else 1."""

    value: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """The ranks that a layer with experts works with."""

    dispatch: Group = ALONE  # ranks that hold different experts
    layer: Group = ALONE  # ranks that split the same experts
    sequences: int = 1  # of the global batch, by which the losses of the router are divided
    loss_scale: LossScale = field(default_factory=LossScale)  # of the current step
    # The rows of each source are multiplied apart, and give a gradient of the weights each, as they do on the rank that
    # they come from: --reproducible adds these terms exactly.
    apart: bool = False
    turns: Turns | None = None  # with what else computes while rows travel; None: nothing does

    @classmethod
    def of(cls, mesh: Mesh, *, sequences: int, apart: bool = False, turns: Turns | None = None) -> ExpertRanks:
        return cls(dispatch=mesh.dispatch, layer=mesh.expert_layer, sequences=sequences, apart=apart, turns=turns)


# ---- where rows go


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where the rows of a microbatch's tokens go, each token once for each of its experts."""

    chosen: int  # k
    order: Tensor  # [rows sent] which pair of token and choice each row is that is sent, by expert and then by token
    positions: Tensor  # [t k] the reverse: which row each pair is; the one after the last for a pair that is not sent
    # Rows of each expert of this rank: of all sources together, or a list for each of them.
    counts: Sequence[Sequence[int]]
    sends_all: bool = True  # every pair is sent
    send: Sequence[int] = ()  # rows for each rank of the group; none where it has one
    receive: Sequence[int] = ()  # rows from each of them
    # [r] which received row comes when they are ordered by expert, source and token; None: they stay in the order of
    # their arrival, by source, expert and token.
    grouped: Tensor | None = None
    arrival: Tensor | None = None  # [r] the reverse


def assign(
    indices: Tensor,
    experts: int,
    group: Group,
    *,
    counts: Tensor | None = None,
    sends_all: bool = True,
    apart: bool = False,
) -> Assignment:
    """Agree with the other ranks on what each sends to each. The host waits for the counts, once.

    Args:
        indices: [t, k] int64, the experts of each token; E for a choice that is not sent.
        experts: E, which the group's size divides; each rank holds as many, in order.
        group: ranks that hold different experts.
        counts: [E or more] int64, how often each index occurs; None: they are counted.
        apart: the rows of each source are computed apart.
    """
    flat = indices.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = (occurrences(flat, experts + 1) if counts is None else counts)[:experts]
    if group.size == 1:
        local = counts.tolist()
        return _assignment(order, indices, sum(local), sends_all=sends_all, counts=[local])
    mine = counts.view(group.size, -1)  # [rank, expert of it]
    theirs = PartsExchanged(mine, group).wait()  # [source, expert of this rank]
    held = mine.shape[1]
    numbers = torch.cat([mine.sum(1), theirs.flatten()]).tolist()
    by_source = [numbers[start : start + held] for start in range(group.size, len(numbers), held)]
    send, receive = numbers[: group.size], list(map(sum, by_source))
    pairs = partial(_assignment, order, indices, sum(send), sends_all=sends_all, send=send, receive=receive)
    if apart:
        return pairs(counts=by_source)
    ends = theirs.flatten().cumsum(0)  # of the rows of each source and expert
    number = torch.searchsorted(ends, torch.arange(sum(receive), device=flat.device), right=True)
    grouped = torch.sort(number % held, stable=True).indices
    together = [list(map(sum, zip(*by_source, strict=True)))]
    return pairs(counts=together, grouped=grouped, arrival=_reverse(grouped))


def _assignment(order: Tensor, indices: Tensor, sent: int, *, sends_all: bool, **others: Any) -> Assignment:
    """That of pairs in this order, of which the first `sent` are sent."""
    positions = _reverse(order)
    if not sends_all:
        order, positions = order[:sent], positions.clamp_(max=sent)
    return Assignment(chosen=indices.shape[1], order=order, positions=positions, sends_all=sends_all, **others)


def occurrences(indices: Tensor, count: int) -> Tensor:
    """How often each index in [0, count) occurs, [count] int64. For `torch.bincount` the host waits for the device."""
    flat = indices.flatten()
    return flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat))


def dispatch(tokens: Tensor, assignment: Assignment, group: Group, turns: Turns | None = None) -> Tensor:
    """[t, h] of every rank -> this rank's rows, [r, h], by expert, source, token; or, apart, by source, expert,
    token. `turns`: pauses for another computation while rows travel."""
    rows: Tensor = _Replicated.apply(tokens, assignment)
    if group.size == 1:
        return rows
    received: Tensor = _Exchanged.apply(rows, assignment.send, assignment.receive, group, turns)
    return received if assignment.grouped is None else _permuted(received, assignment.grouped, assignment.arrival)


def combine(rows: Tensor, weights: Tensor, assignment: Assignment, group: Group, turns: Turns | None = None) -> Tensor:
    """Each token's weighted sum of what its experts gave, [t, h], in fp32 and ascending order of experts. `rows`: [r,
    h], in the order of `dispatch`. `weights`: [t, k] fp32. `turns`: as there."""
    if group.size > 1:
        if assignment.grouped is not None:
            rows = _permuted(rows, assignment.arrival, assignment.grouped)
        rows = _Exchanged.apply(rows, assignment.receive, assignment.send, group, turns)
    combined: Tensor = _Combined.apply(rows, weights, assignment)
    return combined


def _reverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _permuted(x: Tensor, order: Tensor | None, reverse: Tensor | None) -> Tensor:
    permuted: Tensor = _Permuted.apply(x, order, reverse)
    return permuted


class _Permuted(Node):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, reverse: Tensor) -> Tensor:
        ctx.reverse = reverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.reverse), None, None


class _Replicated(Node):
    """A row for each expert of a token, ordered by expert and then by token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        return gather_rows(tokens, assignment.order, assignment.chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return combine_rows(grad, ctx.assignment.positions, None, ctx.assignment.chosen), None


class _Combined(Node):
    """The weighted sum of a token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.assignment = assignment
        return combine_rows(rows, assignment.positions, weights, assignment.chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        return *spread_rows(grad, rows, ctx.assignment.positions, ctx.assignment.order, weights), None


class _Exchanged(Node):
    """Rows for every rank against theirs for this one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, turns: Turns | None
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.turns = send, receive, group, turns
        return _exchanged(x, send, receive, group, turns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = _exchanged(grad.contiguous(), ctx.receive, ctx.send, ctx.group, ctx.turns)
        return dx, None, None, None, None


def _exchanged(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, turns: Turns | None) -> Tensor:
    under_way = RowsExchanged(x, send, receive, group)
    if turns is not None:
        turns.pause()
    return under_way.wait()


# ---- a loss on the way


class _WithLoss(Node):
    """A tensor as it is; backward adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.of_loss = scale, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.of_loss, ctx.scale), None


def with_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """x, through which a scalar loss of a layer becomes a part of what is trained, though it is no output of a stage.
    `x`: on whose way backward passes the layer. `loss`: its gradient is added wherever that of x is computed."""
    joined: Tensor = _WithLoss.apply(x, loss, scale)
    return joined


# ---- the weights


class GroupedProducts(Products):
    """The products of a linear layer of each expert with its rows, as one layer with stacked weights; where `products`
    are torch's, one operator may compute all (ops/grouped.py)."""

    def __init__(self, products: Products, groups: RowGroups) -> None:
        self._products, self._groups = products, groups

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[r, i] and [E, o, i] -> [r, o]"""
        if (together := self._together(x, weight.shape[2], weight.shape[1])) != "loop":
            return grouped_products(x, weight, self._groups, together)
        y = x.new_empty(len(x), weight.shape[1])
        for rows, matrix in zip(self._groups.ranges(), weight, strict=True):
            self._products.write_output(y[rows], x[rows], matrix, None)
        return y

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """[r, o] and [E, o, i] -> [r, i]"""
        if (together := self._together(grad, weight.shape[2], weight.shape[1])) != "loop":
            return grouped_products(grad, weight, self._groups, together, transposed=True)
        dx = grad.new_empty(len(grad), weight.shape[2])
        for rows, matrix in zip(self._groups.ranges(), weight, strict=True):
            self._products.write_input_gradient(dx[rows], grad[rows], matrix)
        return dx

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """[r, o] and [r, i] -> [E, o, i], with zeros for an expert without rows"""
        if (together := self._together(x, x.shape[1], grad.shape[1])) != "loop":
            return grouped_weight_gradients(grad, x, self._groups, together)
        total = grad.new_empty(len(self._groups.counts), grad.shape[1], x.shape[1])
        for rows, of_expert in zip(self._groups.ranges(), total, strict=True):  # of one expert at a time, not all twice
            of_expert.copy_(self._products.weight_gradient(grad[rows], x[rows]))
        return total

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, has_terms: bool) -> None:
        if (together := self._together(x, x.shape[1], grad.shape[1])) != "loop":
            add_grouped_weight_gradients(total, grad, x, self._groups, together, has_terms=has_terms)
            return
        for rows, of_expert in zip(self._groups.ranges(), total, strict=True):
            self._products.add_weight_gradient(of_expert, grad[rows], x[rows], has_terms=has_terms)

    def _together(self, x: Tensor, inputs: int, outputs: int) -> Implementation:
        """What computes the products of all experts at once; `loop`: nothing does."""
        return grouped_implementation(x, inputs, outputs) if isinstance(self._products, TorchProducts) else "loop"


class _Biased(Node):
    """Rows with the bias of their expert added to some features from `first` on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, groups: RowGroups, first: int) -> Tensor:
        ctx.counts, ctx.features = groups.counts, slice(first, first + bias.shape[1])
        biased = rows.clone()
        biased[:, ctx.features] += bias.index_select(0, groups.experts(rows.device))
        return biased

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_experts = grad[:, ctx.features].split(list(ctx.counts))
        return grad, torch.stack([rows.sum(0) for rows in of_experts]), None, None


class GroupedLinear(ShardedModule):
    """A linear layer for each expert, with the weights of this rank's experts stacked.

    Args:
        experts: E, of the whole layer.
        in_features: i.
        out_features: o.
        ranks: that divide the experts, and each of them.
        split: which dimension of the weight the ranks that split an expert divide: 1 for output, 2 for input
            features.
        bias: whether it has one. Where ranks divide the input features of an expert, and their results are summed, each
            rank adds the bias of some output features.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        ranks: ExpertRanks,
        split: int,
        bias: bool = False,
        products: Products,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.products, shape = products, (experts, out_features, in_features)
        self.split, self.group = split, ranks.layer
        own = split_evenly(experts, ranks.dispatch.rank, ranks.dispatch.size)

        def parameter(shape: tuple[int, ...], split: int) -> ShardedParameter:
            held = {0: own, split: split_evenly(shape[split], ranks.layer.rank, ranks.layer.size)}
            slices = tuple(held.get(dimension, (0, size)) for dimension, size in enumerate(shape))
            spec = ShardSpec(shape=shape, slices=slices, is_replicated=False, replica_role="expert_replicas")
            return ShardedParameter(torch.empty(spec.local_shape, device=device), spec)

        self.weight, self.bias = parameter(shape, split), parameter(shape[:2], 1) if bias else None
        self.first = self.bias.spec.slices[1][0] if self.bias is not None and split == 2 else 0

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """[r, i] -> [r, o], a part of the sum where ranks split input features. `x`: rows by expert."""
        y = GroupedProducts(self.products, groups).linear(x, self.weight)
        if self.bias is None:
            return y
        biased: Tensor = _Biased.apply(y, self.bias, groups, self.first)
        return biased
