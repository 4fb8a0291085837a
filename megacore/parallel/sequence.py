"""Sequence parallelism: between the tensor-parallel layers, activations are split along the sequence.

What tensor parallelism leaves whole on every rank (norms, dropout, residuals) is computed for s / t positions on each
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). An all-gather and a reduce-scatter move the same bytes as
the all-reduce that they replace. A column-parallel layer keeps only its own part of the input for backward and
gathers it again there, while the input gradient is computed; the reduce-scatter of that gradient runs while the
weight's is.

Shape legend: b micro-batch, s sequence, h features, t group size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.parallel.collectives import ShardsGathered, SumScattered
from megacore.parallel.mesh import Group
from megacore.parallel.products import TORCH, Parameters, Products, input_gradient, outputs, parameter_gradients


class _GatherOfPieces:
    """An all-gather along the sequence, under way."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self._gathering = ShardsGathered(x, group)

    def wait(self) -> Tensor:
        """[b, s, h] from every rank's [b, s/t, h]"""
        pieces = self._gathering.wait()
        t, b, s, h = pieces.shape
        return pieces.transpose(0, 1).reshape(b, t * s, h)


class _ScatterOfSum:
    """A reduce-scatter along the sequence, under way."""

    def __init__(self, x: Tensor, group: Group) -> None:
        b, s, h = x.shape
        pieces = x.view(b, group.size, s // group.size, h).transpose(0, 1).contiguous()
        self._scattering = SumScattered(pieces, group)

    def wait(self) -> Tensor:
        """[b, s/t, h], summed over the ranks' [b, s, h]"""
        return self._scattering.wait()


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _ScatterOfSum(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherOfPieces(grad, ctx.group).wait(), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _GatherOfPieces(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ScatterOfSum(grad, ctx.group).wait(), None


class _LinearOfGatheredInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, products: Products, x: Tensor, group: Group, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parameters[::2])
        ctx.products, ctx.group = products, group
        ctx.has_bias = [bias is not None for bias in parameters[1::2]]
        return outputs(products, _GatherOfPieces(x, group).wait(), parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gathering = _GatherOfPieces(x, ctx.group)
        scattering = _ScatterOfSum(input_gradient(ctx.products, grads, weights), ctx.group)
        gradients = parameter_gradients(ctx.products, gathering.wait(), grads, ctx.has_bias)
        return None, scattering.wait(), None, *gradients


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial [b, s, h] of every rank -> this rank's positions of the sum, [b, s/t, h]; backward gathers."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[b, s, h] from every rank's [b, s/t, h]; backward sums over the ranks and keeps this one's positions."""
    return x if group.size == 1 else _Gather.apply(x, group)


def linears_of_gathered_input(
    x: Tensor, parameters: Parameters, group: Group, products: Products = TORCH
) -> tuple[Tensor, ...]:
    """x W^T + b over all positions for each weight and bias, whose rows are this rank's output features.

    Args:
        x: [b, s/t, i]
        parameters: weight, bias, weight, bias, ...
        group: the tensor-parallel group, of two ranks or more.
        products: computes the matrix products.

    Returns:
        [b, s, o/t] of each.
    """
    y: tuple[Tensor, ...] = _LinearOfGatheredInput.apply(products, x, group, *parameters)
    return y


def own_positions(length: int, group: Group) -> slice:
    """Which of `length` positions this rank holds between the tensor-parallel layers."""
    share = length // group.size
    return slice(group.rank * share, (group.rank + 1) * share)
