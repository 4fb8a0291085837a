"""Sequence parallelism: what tensor parallelism leaves whole on every rank (norms, dropout, residuals) is computed for
s / t positions on each (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

An all-gather along the sequence enters a tensor-parallel region and a reduce-scatter leaves it; each is the other's
backward, and the two move the same bytes as the all-reduce that they replace. A CPU moves all samples of a microbatch
at once; an accelerator moves sample by sample, while products of other samples run.

Shape legend: s sequence, b micro-batch, h hidden size, o output features, t group size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megacore.ops import on_accelerator
from megacore.ops.dispatch import Node
from megacore.parallel.collectives import (
    Pending,
    ShardsGathered,
    SumScattered,
    start_all_gather,
    start_reduce_scatter,
)
from megacore.parallel.mesh import Group
from megacore.parallel.products import LinearLayers, Parameters


class Gathering(Protocol):
    """An all-gather along the sequence, under way: the input of linear layers, computed with as it arrives."""

    def wait(self) -> Tensor:
        """[b, s, h] from every rank's [b, s/t, h]"""

    def outputs(self, layers: LinearLayers, parameters: Parameters) -> tuple[Tensor, ...]:
        """What the layers give for the whole input, [b, s, o] each."""

    def input_gradient(self, layers: LinearLayers, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Scattering:
        """The input's gradient from those of the outputs: computed, and being summed over the ranks."""


class Scattering(Protocol):
    """A reduce-scatter along the sequence, under way."""

    def wait(self) -> Tensor:
        """[b, s/t, h], summed over the ranks' [b, s, h]"""


class _WholeGather:
    """All samples by one all-gather, whose pieces are then put in order."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self._gathering, self._group = ShardsGathered(x, group), group

    def wait(self) -> Tensor:
        pieces = self._gathering.wait()
        t, b, s, h = pieces.shape
        return pieces.transpose(0, 1).reshape(b, t * s, h)

    def outputs(self, layers: LinearLayers, parameters: Parameters) -> tuple[Tensor, ...]:
        return layers.outputs(self.wait(), parameters)

    def input_gradient(self, layers: LinearLayers, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Scattering:
        return _WholeScatter(layers.input_gradient(grads, weights), self._group)


class _WholeScatter:
    """All samples by one reduce-scatter, for which the pieces were put in order."""

    def __init__(self, x: Tensor, group: Group) -> None:
        b, s, h = x.shape
        pieces = x.view(b, group.size, s // group.size, h).transpose(0, 1).contiguous()
        self._scattering = SumScattered(pieces, group)

    def wait(self) -> Tensor:
        return self._scattering.wait()


class SampleGathers:
    """An all-gather for each sample: a product of one sample runs while the next is gathered, without copies."""

    def __init__(self, x: Tensor, group: Group) -> None:
        b, s, h = x.shape
        self._group = group
        self.whole = x.new_empty(b, s * group.size, h)
        self._pending = [
            start_all_gather(whole.view(-1), sample.view(-1), group)
            for whole, sample in zip(self.whole, x.contiguous(), strict=True)
        ]

    def samples(self) -> Iterator[Tensor]:
        for whole, pending in zip(self.whole, self._pending, strict=True):
            pending.wait()
            yield whole

    def wait(self) -> Tensor:
        for pending in self._pending:
            pending.wait()
        return self.whole

    def outputs(self, layers: LinearLayers, parameters: Parameters) -> tuple[Tensor, ...]:
        pairs = layers.pairs(parameters)
        outputs = tuple(self.whole.new_empty(*self.whole.shape[:2], weight.shape[0]) for weight, _ in pairs)
        for number, sample in enumerate(self.samples()):
            for y, (weight, bias) in zip(outputs, pairs, strict=True):
                layers.products.write_output(y[number], sample, weight, bias)
        return outputs

    def input_gradient(self, layers: LinearLayers, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Scattering:
        dx, matrices = torch.empty_like(self.whole), layers.matrices(weights)
        scattering = SampleScatters(dx, self._group)
        for number in range(len(dx)):
            layers.write_input_gradient(dx[number], [grad[number] for grad in grads], matrices)
            scattering.start()
        return scattering


class SampleScatters:
    """A reduce-scatter for each sample, which runs while the next sample is computed. `x`: [b, s, h], whose samples are
    written one after the other. `group`: of two ranks or more."""

    def __init__(self, x: Tensor, group: Group) -> None:
        b, s, h = x.shape
        self._whole, self._group, self._pending = x, group, list[Pending]()
        self._local = x.new_empty(b, s // group.size, h)

    def start(self) -> None:
        number = len(self._pending)
        local, whole = self._local[number].view(-1), self._whole[number].view(-1)
        self._pending.append(start_reduce_scatter(local, whole, self._group))

    def wait(self) -> Tensor:
        for pending in self._pending:
            pending.wait()
        return self._local


def start_gather(x: Tensor, group: Group) -> Gathering:
    """Begin to gather [b, s/t, h] of every rank to [b, s, h]. A gather of all samples at once takes copies, one for
    each sample takes messages: copies are cheaper on a CPU."""
    return SampleGathers(x, group) if on_accelerator(x) else _WholeGather(x, group)


def start_scatter(x: Tensor, group: Group) -> Scattering:
    """Begin to sum [b, s, h] over the ranks, of which each keeps [b, s/t, h]."""
    if not on_accelerator(x):
        return _WholeScatter(x, group)
    scattering = SampleScatters(x.contiguous(), group)
    for _ in x:
        scattering.start()
    return scattering


class _Exchanged(Node):
    """A gather along the sequence, or a reduce-scatter: each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return (start_gather if gathers else start_scatter)(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (start_scatter if ctx.gathers else start_gather)(grad, ctx.group).wait(), None, None


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial [b, s, h] of every rank -> this rank's positions of the sum, [b, s/t, h]; backward gathers."""
    return x if group.size == 1 else _Exchanged.apply(x, group, False)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[b, s, h] from every rank's [b, s/t, h]; backward sums over the ranks and keeps this one's positions."""
    return x if group.size == 1 else _Exchanged.apply(x, group, True)


def local_positions(length: int, group: Group) -> slice:
    """Which of `length` positions this rank holds between the tensor-parallel layers."""
    share = length // group.size
    return slice(group.rank * share, (group.rank + 1) * share)
