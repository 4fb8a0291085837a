"""--async-tp: linear layers that multiply while their communication runs (Wang et al. 2023, "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS).

A sequence-parallel layer multiplies what all ranks have, or sums what all ranks have multiplied. Both fall apart into
pieces, the positions of a rank: its own piece is multiplied first, while the others travel, and the pieces of a sum
leave one by one. So even a single sample overlaps, which `sequence.py` gathers as a whole.

`SymmetricMemory` is torch's way on GPUs of one node, whose copy engines read the other ranks' memory. `Messages` does
the same products in the same order on any device. `parallelize()` gives layers the exchanges below.

Shape legend: b microbatch, s sequence, i input features, o output features, t group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.parallel.collectives import EachExchanged, all_gather_objects, why_no_shared_memory
from megacore.parallel.mesh import Group, Mesh, may_share_memory
from megacore.parallel.products import TORCH, LinearLayers, Parameters
from megacore.parallel.sequence import start_gather
from megacore.parallel.tensor import ColumnParallelLinear, Exchange, Gradients, RowParallelLinear


class Way(Protocol):
    """How the ranks of a group exchange pieces while they multiply."""

    def gathered_products(self, x: Tensor, factors: Sequence[Tensor], group: Group) -> tuple[Tensor, list[Tensor]]:
        """The ranks' x, [b, s/t, i] -> [b, s, i], and its products with every factor [i, o], [b, s, o]."""

    def scattered_product(self, x: Tensor, factor: Tensor, group: Group) -> Tensor:
        """This rank's positions of the sum over the ranks of x F: [b, s, i] and [i, o] -> [b, s/t, o]"""


class Messages:
    """By messages between the ranks, on any device."""

    def gathered_products(self, x: Tensor, factors: Sequence[Tensor], group: Group) -> tuple[Tensor, list[Tensor]]:
        (b, s, h), t = x.shape, group.size
        pieces, x = EachExchanged(x, group), x.contiguous()
        for distance in range(1, t):  # this rank needs the piece of the next one first
            pieces.send(x, t - distance)
        whole = x.new_empty(b, t, s, h)
        outputs = [x.new_empty(b, t, s, factor.shape[1]) for factor in factors]
        for step in range(t):
            source = (group.rank + step) % t
            whole[:, source] = x if step == 0 else pieces.wait(source)
            for y, factor in zip(outputs, factors, strict=True):
                y[:, source] = whole[:, source] @ factor
        return whole.flatten(1, 2), [y.flatten(1, 2) for y in outputs]

    def scattered_product(self, x: Tensor, factor: Tensor, group: Group) -> Tensor:
        t = group.size
        parts = x.unflatten(1, (t, -1))  # [b, t, s/t, i]
        terms: list[Tensor | None] = [None] * t
        like = x.new_empty(len(x), parts.shape[2], factor.shape[1])
        pieces = EachExchanged(like, group)
        for distance in range(1, t):  # this rank's own piece is the last to be computed, while those travel
            pieces.send(parts[:, (group.rank + distance) % t] @ factor, distance)
        terms[group.rank] = parts[:, group.rank] @ factor
        return torch.stack([pieces.wait(r) if term is None else term for r, term in enumerate(terms)]).sum(0)


class SymmetricMemory:
    """By reads of the other ranks' memory, on GPUs that can."""

    # With one sample nothing is copied: pieces of a sequence lie one after the other. With several, torch puts them in
    # order before, and here they are afterwards.

    def gathered_products(self, x: Tensor, factors: Sequence[Tensor], group: Group) -> tuple[Tensor, list[Tensor]]:
        whole, outputs = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), list(factors), 1, group.name)
        return whole.contiguous(), [y.contiguous() for y in outputs]

    def scattered_product(self, x: Tensor, factor: Tensor, group: Group) -> Tensor:
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), factor, "sum", 1, group.name)
        return y.contiguous()


class ArrivingInput(Exchange):
    """A rank holds its positions of the input, which arrive while those that are there are multiplied. Backward gathers
    them for the weight gradients, and the pieces of the input's gradient leave as they are computed."""

    def __init__(self, group: Group, way: Way) -> None:
        super().__init__(group)
        self.way = way

    def outputs(self, layers: LinearLayers, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        pairs = layers.pairs(parameters)
        _, outputs = self.way.gathered_products(x, [weight.t() for weight, _ in pairs], self.group)
        return tuple(y if bias is None else y.add_(bias) for y, (_, bias) in zip(outputs, pairs, strict=True))

    def gradients(
        self, layers: LinearLayers, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], wants_input: bool
    ) -> Gradients:
        gathering = None if layers.frozen else start_gather(x, self.group)
        dx: Tensor | None = None
        if wants_input:
            # Several weights have one product: their outputs' gradients side by side, the weights below each other.
            matrices = layers.matrices(weights)
            grad, matrix = grads[0], matrices[0]
            if len(matrices) > 1:
                grad, matrix = torch.cat([*grads], -1), torch.cat([*matrices])
            dx = self.way.scattered_product(grad, matrix, self.group)
        return dx, layers.parameter_gradients(x if gathering is None else gathering.wait(), grads)


class LeavingOutput(Exchange):
    """Every rank computes a part of the output, whose pieces leave as they are computed. Backward multiplies the
    gradient of the output as it arrives."""

    def __init__(self, group: Group, way: Way) -> None:
        super().__init__(group)
        self.way = way

    def outputs(self, layers: LinearLayers, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        weight, bias = parameters
        assert weight is not None
        y = self.way.scattered_product(x, weight.t(), self.group)
        return (y if bias is None else y.add_(bias),)

    def gradients(
        self, layers: LinearLayers, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], wants_input: bool
    ) -> Gradients:
        whole, products = self.way.gathered_products(grads[0], weights[:1] if wants_input else [], self.group)
        learns = layers.parameters[1] is not None and not layers.frozen
        # Of a bias as in `tensor.py`: of this rank's positions.
        gradients = layers.weight_gradient(x, whole), grads[0].sum((0, 1)) if learns else None
        return products[0] if wants_input else None, gradients


def way_of(mesh: Mesh) -> Way:
    """What the ranks of the mesh have; all of them call this together. Raises ConfigError where GPUs have no symmetric
    memory."""
    if not may_share_memory(mesh.device):
        return Messages()
    if found := [reason for reason in all_gather_objects(why_no_shared_memory(mesh.layer), mesh.world) if reason]:
        raise ConfigError(
            [f"--async-tp needs symmetric memory between the --tp ranks, and there is none: {found[0]}: leave it out"]
        )
    return SymmetricMemory()


def exchange(layer: nn.Module, group: Group, way: Way) -> None:
    """Let the sequence-parallel linear layers inside a block multiply while they communicate. `layer`: the block, as it
    was built."""
    for module in layer.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            continue
        if module.sequence_parallel and module.group is group and module.products is TORCH:
            kind = ArrivingInput if isinstance(module, ColumnParallelLinear) else LeavingOutput
            module.exchange = kind(group, way)
