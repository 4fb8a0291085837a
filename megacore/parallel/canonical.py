"""Canonical blocks: sums whose bits do not depend on how many ranks divide a layer, for --reproducible.

Floating-point addition rounds, and tensor parallelism decides where the sums inside matrix products are cut. Here every
layout cuts them at the same points. Features, heads, the vocabulary and, for gradients of parameters that every rank
holds, positions are divided into B blocks. Each block is computed by the same operators on operands of the same shape,
and the results are added in one binary tree. A rank of t holds B/t neighbouring blocks: a subtree. The upper levels of
the tree add the ranks' results, which each rank gets by an all-to-all. Partial sums are fp32 in every precision.

Why the pieces are the same bits: a product of equal operands with equal shapes and strides, at aligned addresses, is
the same instructions. Operators on single elements give the same bits wherever the element lies, as long as no tensor
ends within a vector register; the configuration refuses sizes where one would.

Shape legend: B blocks, t tensor-parallel ranks, s sequence, b micro-batch, i input features, o output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import Node
from megacore.parallel.collectives import PartsExchanged, ShardsGathered, all_gather
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import Parameters, Products, with_gradient
from megacore.parallel.sharding import ShardedParameter, separate_term, split_evenly

_ALIGNMENT = 64  # bytes; matrix products may round differently at other addresses


@dataclass(frozen=True)
class Blocks:
    """The blocks that a layout-independent sum consists of, and those of them that this rank holds.

    Attributes:
        count: B, a power of two that the group's size divides; 1: sums are cut where the layout cuts them.
        group: the tensor-parallel group.
        sequence_parallel: between the tensor-parallel layers a rank holds s/t positions, otherwise all of them.
    """

    count: int = 1
    group: Group = ALONE
    sequence_parallel: bool = False

    @property
    def divide(self) -> bool:
        """Whether sums are divided at all."""
        return self.count > 1

    @property
    def held(self) -> range:
        """The numbers of this rank's blocks."""
        share = self.count // self.group.size
        return range(self.group.rank * share, (self.group.rank + 1) * share)

    @property
    def held_positions(self) -> range:
        """The numbers of the blocks of positions that this rank holds between the tensor-parallel layers."""
        return self.held if self.sequence_parallel else range(self.count)

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """[start, stop) of this rank's blocks of a dimension of `size` entries over all ranks."""
        return [split_evenly(size, number, self.count) for number in self.held]

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """This rank's blocks of a dimension that the ranks divide evenly: contiguous, at aligned addresses."""
        return [aligned(part) for part in x.chunk(len(self.held), dim)]

    def split_positions(self, x: Tensor, dim: int = 1) -> list[Tensor]:
        """The blocks of positions of a tensor between the tensor-parallel layers: contiguous."""
        return [aligned(part) for part in x.split(self.sizes_of_positions(x.shape[dim]), dim)]

    def sizes_of_positions(self, local: int) -> list[int]:
        """Of each block of positions that this rank holds, of `local` positions in all."""
        held = self.held_positions
        whole = local * self.count // len(held)
        bounds = [split_evenly(whole, number, self.count) for number in held]
        return [stop - start for start, stop in bounds]

    def over_positions(
        self,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[ShardedParameter | None],
    ) -> Tensor:
        """A function of single positions, computed a block of positions at a time, so that gradients of parameters that
        every rank holds are sums over canonical blocks.

        Args:
            function: of blocks of `tensors`, then of the parameters.
            tensors: [b, s, ...] (or, sequence parallel, [b, s/t, ...]).
            parameters: that every rank holds; None is passed on.

        Returns:
            The results, joined along positions.
        """
        if not self.divide:
            return function(*tensors, *parameters)
        number = len(self.held_positions)
        views = [[None] * number if p is None else self.terms(p, number) for p in parameters]
        blocks = [self.split_positions(x) for x in tensors]
        return torch.cat([function(*operands) for operands in zip(*blocks, *views, strict=True)], 1)

    def over_heads(
        self,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[ShardedParameter | None],
    ) -> Tensor:
        """The same of heads: tensors [b, s, heads of this rank, d], of which each block has one or more."""
        number = len(self.held)
        gathered = not self.sequence_parallel  # then the ranks' sums are not added later
        views = [[None] * number if p is None else self.terms(p, number, gathered=gathered) for p in parameters]
        blocks = [self.split(x, 2) for x in tensors]
        return torch.cat([function(*operands) for operands in zip(*blocks, *views, strict=True)], 2)

    def terms(self, parameter: ShardedParameter, number: int, *, gathered: bool = False) -> list[Tensor]:
        """Views of a parameter whose gradients are terms of an exact sum.

        Args:
            parameter: that every rank holds.
            number: of views.
            gathered: every rank gets the terms of all ranks; otherwise the ranks' sums are added later.
        """
        if gathered and self.group.size > 1 and parameter.requires_grad and torch.is_grad_enabled():
            views: tuple[Tensor, ...] = _TermsOfRanks.apply(parameter, number, self.group)
            return list(views)
        return [parameter, *(separate_term(parameter) for _ in range(number - 1))]

    def columns(self, x: Tensor, parameters: Parameters, products: Products) -> tuple[Tensor, ...]:
        """Column-parallel layers that share an input.

        Args:
            x: [b, s, i], or, sequence parallel, [b, s/t, i].
            parameters: weight [o/t, i], bias [o/t] or None, weight, ...
            products: computes the matrix products.

        Returns:
            [b, s, o/t] of each layer.
        """
        pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
        whole = _gathered(x.detach(), self) if self._scatters else x.detach()
        fixed = [None if p is None else p.detach() for p in parameters]
        outputs: tuple[Tensor, ...] = _ColumnOutputs.apply(self, products, x, whole, *fixed)
        return tuple(
            self._with_weights(y, whole, weight, bias, dim=0, products=products)
            for y, (weight, bias) in zip(outputs, pairs, strict=True)
        )

    def row(self, x: Tensor, weight: Tensor, bias: ShardedParameter | None, products: Products) -> Tensor:
        """A row-parallel layer.

        Args:
            x: [b, s, i/t]
            weight: [o, i/t]
            bias: [o], which every rank holds, or None.
            products: computes the matrix products.

        Returns:
            [b, s, o], or, sequence parallel, [b, s/t, o].
        """
        partial: Tensor = _RowOutput.apply(self, products, x, weight.detach())
        partial = self._with_weights(partial, x.detach(), weight, None, dim=1, products=products)
        y: Tensor = _RankSum.apply(partial, self, x.dtype)
        return y if bias is None else self.over_positions(torch.add, [y], [bias])

    def copies(self, x: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        """Copies of every head, next to it, whose gradients are added in the tree.

        Args:
            x: [b, s, heads, d] fp32.
            number: a power of two.
            dtype: of the result.

        Returns:
            [b, s, heads x number, d]
        """
        if number == 1:
            return x.to(dtype)
        copied: Tensor = _Copies.apply(x, number, dtype)
        return copied

    def gathered_features(self, x: Tensor) -> Tensor:
        """[b, s, o/t] fp32 -> those of all ranks, [b, s, o]; gradients are added in the tree."""
        gathered: Tensor = _GatheredFeatures.apply(x, self)
        return gathered

    def entered(self, x: Tensor) -> Tensor:
        """[b, s, h] (or [b, s/t, h]) -> all positions, [b, s, h] fp32; gradients are added in the tree."""
        whole: Tensor = _Entered.apply(x, self)
        return whole

    def sum_of_ranks(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, fp32, in the order of the tree; the same bits on every rank."""
        ranks = self.group.size
        if ranks == 1:
            return x
        flat = x.reshape(-1)
        padded = F.pad(flat, (0, -flat.numel() % ranks))
        mine = tree_sum(PartsExchanged(padded.view(ranks, -1), self.group).wait().unbind(0))
        return ShardsGathered(mine, self.group).wait().view(-1)[: flat.numel()].view(x.shape)

    def scattered_sum(self, x: Tensor) -> Tensor:
        """This rank's positions of the sum of the ranks' tensors [b, s, h], fp32, in the order of the tree."""
        ranks = self.group.size
        b, s, h = x.shape
        pieces = x.view(b, ranks, s // ranks, h).transpose(0, 1).contiguous()
        return tree_sum(PartsExchanged(pieces, self.group).wait().unbind(0))

    @property
    def _scatters(self) -> bool:
        return self.sequence_parallel and self.group.size > 1

    def _with_weights(
        self, y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, dim: int, products: Products
    ) -> Tensor:
        """y, whose backward computes the gradients of weight and bias too; `dim` of the weight is divided."""
        if not torch.is_grad_enabled() or weight is None or not weight.requires_grad:
            return y
        return with_gradient(y, _WeightGradients.apply(self, products, y.detach(), x, dim, weight, bias))

    def _leave(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """A rank's part of a sum [b, s, h] -> the sum, or, sequence parallel, this rank's positions of it."""
        return (self.scattered_sum(partial) if self._scatters else self.sum_of_ranks(partial)).to(dtype)


ONE_BLOCK = Blocks()
"""Sums are cut where the layout cuts them."""


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of 2^k tensors: neighbours are added first, then neighbouring pairs, and so on."""
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an aligned address."""
    x = x.contiguous()
    return x if x.storage_offset() * x.element_size() % _ALIGNMENT == 0 else x.clone()


def _gathered(x: Tensor, blocks: Blocks) -> Tensor:
    """[b, s, h] from every rank's [b, s/t, h]"""
    return ShardsGathered(x, blocks.group).wait().transpose(0, 1).flatten(1, 2).contiguous()


class _ColumnOutputs(Node):
    """Outputs; backward gives the gradient of the input only."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, products: Products, x: Tensor, whole: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.blocks, ctx.products, ctx.weights, ctx.dtype = blocks, products, weights, x.dtype
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            assert weight is not None
            shifts = [None] * len(blocks.held) if bias is None else blocks.split(bias, 0)
            parts = zip(blocks.split(weight, 0), shifts, strict=True)
            outputs.append(torch.cat([products.output(whole, w, shift) for w, shift in parts], -1))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        nothing = (None,) * (2 * len(grads))
        if not ctx.needs_input_grad[2]:
            return None, None, None, None, *nothing
        of_layers = [
            [ctx.products.input_gradient(grad, weight).float() for grad, weight in parts]
            for parts in (
                zip(blocks.split(grad, -1), blocks.split(weight, 0), strict=True)
                for grad, weight in zip(grads, ctx.weights, strict=True)
            )
        ]
        partial = tree_sum([sum(terms[1:], terms[0]) for terms in zip(*of_layers, strict=True)])
        return None, None, blocks._leave(partial, ctx.dtype), None, *nothing


class _WeightGradients(Node):
    """Forward gives zeros of the output's shape, one number in memory; backward the gradients of weight and bias.

    Schedules that split backward ask autograd for one or the other: the input's gradient is in another node.
    """

    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, products: Products, y: Tensor, x: Tensor, dim: int, weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x)
        ctx.blocks, ctx.products, ctx.dim, ctx.has_bias = blocks, products, dim, bias is not None
        return y.new_zeros(()).expand(y.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        blocks, weight_gradient = ctx.blocks, ctx.products.weight_gradient
        rows, inputs = grad.to(x.dtype).flatten(0, -2), x.flatten(0, -2)
        if ctx.dim == 1:
            d_weight = torch.cat([weight_gradient(rows, part) for part in blocks.split(inputs, 1)], 1)
            return *(None,) * 5, d_weight, None
        parts = blocks.split(rows, 1)
        d_weight = torch.cat([weight_gradient(part, inputs) for part in parts])
        return *(None,) * 5, d_weight, torch.cat([part.sum(0) for part in parts]) if ctx.has_bias else None


class _RowOutput(Node):
    """This rank's part of the output, in fp32; backward gives the gradient of the input only."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, products: Products, x: Tensor, weight: Tensor) -> Tensor:
        ctx.blocks, ctx.products, ctx.weight, ctx.dtype = blocks, products, weight, x.dtype
        parts = zip(blocks.split(x, -1), blocks.split(weight, 1), strict=True)
        return tree_sum([products.output(part, w, None).float() for part, w in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[2]:
            return None, None, None, None
        grad = grad.to(ctx.dtype)
        parts = [ctx.products.input_gradient(grad, w) for w in ctx.blocks.split(ctx.weight, 1)]
        return None, None, torch.cat(parts, -1), None


class _RankSum(Node):
    """The sum of the ranks' parts; backward hands every rank the gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
        ctx.blocks = blocks
        return blocks._leave(partial, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = _gathered(grad, ctx.blocks) if ctx.blocks._scatters else grad.contiguous()
        return grad.float(), None, None


class _Entered(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks, ctx.dtype = blocks, x.dtype
        return (_gathered(x, blocks) if blocks._scatters else x.view_as(x)).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.blocks._leave(grad, ctx.dtype), None


class _GatheredFeatures(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks = blocks
        return torch.cat(ShardsGathered(x, blocks.group).wait().unbind(), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.blocks.group
        pieces = torch.stack(grad.chunk(group.size, -1))
        return tree_sum(PartsExchanged(pieces, group).wait().unbind(0)), None


class _Copies(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        ctx.number = number
        return x.to(dtype).repeat_interleave(number, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return tree_sum(grad.float().unflatten(2, (-1, ctx.number)).unbind(3)), None, None


class _TermsOfRanks(Node):
    """Views of a parameter, whose gradients every rank gets from all ranks. Backward gives all but the last to
    `take_term` of the parameter, and the last to autograd."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter, number: int, group: Group) -> tuple[Tensor, ...]:
        ctx.parameter, ctx.group = parameter, group
        return tuple(parameter.view_as(parameter) for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        terms = all_gather(torch.stack(grads), ctx.group).flatten(0, 1).unbind()
        take = ctx.parameter.take_term
        if take is None:
            return tree_sum(terms), None, None
        for term in terms[:-1]:
            take(ctx.parameter, term)
        return terms[-1], None, None
