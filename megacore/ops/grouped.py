"""Linear layers of many experts, each with other rows, in one operator; and the rows themselves.

Three implementations: a Triton kernel; torch's `grouped_mm`, which on NVIDIA's Hopper and later runs as one kernel for
bf16; and a loop of products, which needs nothing and is what a CPU runs (parallel/experts.py has it, so that
`Products` decides how experts multiply). All of them know how many rows each expert has on the host: `grouped_mm` then
never has rows beyond its last offset, which it would leave as they are.

Shape legend: t tokens, k experts that a token uses, r rows, E experts, i input features, o output features, h width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import custom_op, is_triton_asked_for, operator, runs_triton, uses_triton

Implementation = Literal["triton", "grouped_mm", "loop"]
_HALVES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes that rows of `grouped_mm`'s operands are multiples of


class RowGroups:
    """Which rows belong to which expert, in order of experts. Tables on a device are made once, when first needed."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._tiles: dict[tuple[int, torch.device], Tensor] = {}
        self._bounds: dict[torch.device, Tensor] = {}

    def ranges(self) -> list[slice]:
        ends = list(accumulate(self.counts))
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]

    def bounds(self, device: torch.device) -> Tensor:
        """[E + 1] int32: where the rows of each expert begin, and the end of the last."""
        if device not in self._bounds:
            self._bounds[device] = _table([0, *accumulate(self.counts)], device)
        return self._bounds[device]

    def experts(self, device: torch.device) -> Tensor:
        """[r] int32: the expert of each row."""
        numbers, counts = torch.arange(len(self.counts), dtype=torch.int32), torch.tensor(self.counts)
        return numbers.repeat_interleave(counts, output_size=sum(self.counts)).to(device, non_blocking=True)

    def tiles(self, height: int, device: torch.device) -> Tensor:
        """[T, 3] int32: expert, first row and the end of the expert's rows of every tile of so many rows."""
        if (height, device) not in self._tiles:
            rows = [
                (expert, first, of.stop)
                for expert, of in enumerate(self.ranges())
                for first in range(of.start, of.stop, height)
            ]
            self._tiles[height, device] = _table(rows, device).view(-1, 3)
        return self._tiles[height, device]


def _table(numbers: list[int] | list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Small whole numbers on a device, without a wait for what it computes."""
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def grouped_implementation(x: Tensor, inputs: int, outputs: int) -> Implementation:
    """What computes the products of experts. `inputs`: i. `outputs`: o."""
    # Whether torch has one kernel for it, instead of a loop of its own that waits for the device.
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in (inputs, outputs))
    fast = x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm") and _is_hopper(x.device)
    if fast and not is_triton_asked_for():
        return "grouped_mm"
    # In fp32 a GPU's own products are faster, one by one; also on the device that stands for one in a dry run.
    return "triton" if uses_triton(x) and (x.dtype in _HALVES or x.device.type == "cpu") else "loop"


@cache
def _is_hopper(device: torch.device) -> bool:
    return bool(torch.get_device_module(device).get_device_capability(device) >= (9, 0))


# ---- products


@operator("megacore::grouped_products")
def _triton_products(x: Tensor, weight: Tensor, tiles: Tensor, transposed: bool) -> Tensor:
    import megacore.kernels.grouped as kernel

    return kernel.products(x, weight, tiles, transposed=transposed)


@_triton_products.register_fake
def _(x: Tensor, weight: Tensor, tiles: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(len(x), weight.shape[2 if transposed else 1])


@operator("megacore::grouped_weight_gradients")
def _triton_gradients(grad: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    import megacore.kernels.grouped as kernel

    total = grad.new_empty(len(bounds) - 1, grad.shape[1], x.shape[1])
    kernel.weight_gradients(grad, x, total, bounds, add=False)
    return total


@_triton_gradients.register_fake
def _(grad: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    return grad.new_empty(len(bounds) - 1, grad.shape[1], x.shape[1])


@custom_op("megacore::add_grouped_weight_gradients_", mutates_args=("total",))
def _triton_added(total: Tensor, grad: Tensor, x: Tensor, bounds: Tensor, has_terms: bool) -> None:
    import megacore.kernels.grouped as kernel

    kernel.weight_gradients(grad, x, total, bounds, add=has_terms)


def grouped_products(
    x: Tensor, weight: Tensor, groups: RowGroups, implementation: Implementation, *, transposed: bool = False
) -> Tensor:
    """x W^T of each expert's rows, [r, i] and [E, o, i] -> [r, o]; or, `transposed`, x W, [r, o] -> [r, i]. `weight`:
    [E, o, i]. `implementation`: `triton` or `grouped_mm`."""
    x = x.contiguous()
    if implementation == "triton":
        import megacore.kernels.grouped as kernel

        tiles = groups.tiles(kernel.rows_of_tile(x.dtype), x.device)
        result: Tensor = _triton_products(x, weight.contiguous(), tiles, transposed)
        return result
    if not len(x):
        return x.new_empty(0, weight.shape[2 if transposed else 1])
    return F.grouped_mm(x, weight if transposed else weight.transpose(1, 2), offs=groups.bounds(x.device)[1:])


def grouped_weight_gradients(grad: Tensor, x: Tensor, groups: RowGroups, implementation: Implementation) -> Tensor:
    """dY^T X of each expert's rows: [r, o] and [r, i] -> [E, o, i], 0 without rows; otherwise as `grouped_products`."""
    grad, x = grad.contiguous(), x.contiguous()
    if implementation == "triton":
        result: Tensor = _triton_gradients(grad, x, groups.bounds(x.device))
        return result
    if not len(x):
        return grad.new_zeros(len(groups.counts), grad.shape[1], x.shape[1])
    total = F.grouped_mm(grad.t(), x, offs=groups.bounds(x.device)[1:])
    for expert, count in enumerate(groups.counts):
        if count == 0:  # of which some devices give anything
            total[expert].zero_()
    return total


def add_grouped_weight_gradients(
    total: Tensor, grad: Tensor, x: Tensor, groups: RowGroups, implementation: Implementation, *, has_terms: bool
) -> None:
    """The same added to `total`, [E, o, i] fp32; without `has_terms` it is overwritten."""
    if implementation == "triton":
        _triton_added(total, grad.contiguous(), x.contiguous(), groups.bounds(x.device), has_terms)
        return
    term = grouped_weight_gradients(grad, x, groups, implementation)
    total.add_(term) if has_terms else total.copy_(term)


# ---- rows


@operator("megacore::gather_rows")
def _gather_rows(tokens: Tensor, order: Tensor, chosen: int) -> Tensor:
    if runs_triton(tokens, "tokens"):
        import megacore.kernels.permute as kernel

        return kernel.gather(tokens, order, chosen)
    return tokens.index_select(0, order // chosen)


@_gather_rows.register_fake
def _(tokens: Tensor, order: Tensor, chosen: int) -> Tensor:
    return tokens.new_empty(len(order), tokens.shape[1])


def _pairs(rows: Tensor, positions: Tensor, chosen: int) -> Tensor:
    """[r, h] -> [t, k, h], with zeros for pairs that have no row"""
    if len(rows) < len(positions):
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return rows.index_select(0, positions).unflatten(0, (-1, chosen))


@operator("megacore::combine_rows")
def _combine_rows(rows: Tensor, positions: Tensor, weights: Tensor | None, chosen: int) -> Tensor:
    if runs_triton(rows, "rows"):
        import megacore.kernels.permute as kernel

        return kernel.combine(rows, positions, weights, chosen)
    pairs = _pairs(rows, positions, chosen)
    total = pairs[:, 0].float() if weights is None else pairs[:, 0].float() * weights[:, 0, None]
    for number in range(1, chosen):
        term = pairs[:, number].float()
        total = total + (term if weights is None else term * weights[:, number, None])
    return total.to(rows.dtype)


@_combine_rows.register_fake
def _(rows: Tensor, positions: Tensor, weights: Tensor | None, chosen: int) -> Tensor:
    return rows.new_empty(len(positions) // chosen, rows.shape[1])


@operator("megacore::spread_rows")
def _spread_rows(
    grad: Tensor, rows: Tensor, positions: Tensor, order: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    if runs_triton(rows, "rows"):
        import megacore.kernels.permute as kernel

        return kernel.spread(grad, rows, positions, weights)
    pairs = _pairs(rows, positions, weights.shape[1])
    of_rows = (grad.float()[:, None] * weights[..., None]).to(rows.dtype)  # [t, k, h]
    of_weights = (grad.float()[:, None] * pairs.float()).sum(-1)
    return of_rows.flatten(0, 1).index_select(0, order), of_weights


@_spread_rows.register_fake
def _(grad: Tensor, rows: Tensor, positions: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def gather_rows(tokens: Tensor, order: Tensor, chosen: int) -> Tensor:
    """[t, h] -> [r, h]: a row for some pairs of a token and a choice, in the order that `order` [r] gives; pair p is of
    token p // k. Autograd does not see it."""
    rows: Tensor = _gather_rows(tokens.contiguous(), order, chosen)
    return rows


def combine_rows(rows: Tensor, positions: Tensor, weights: Tensor | None, chosen: int) -> Tensor:
    """[r, h] -> [t, h]: the sum of each token's rows, or their weighted sum, in fp32 and in the order of its choices.
    Autograd does not see it. `positions`: [t k]: the row of each pair; r where it has none. `weights`: [t, k] fp32;
    None: all are 1. `chosen`: k."""
    total: Tensor = _combine_rows(
        rows.contiguous(), positions, None if weights is None else weights.contiguous(), chosen
    )
    return total


def spread_rows(grad: Tensor, rows: Tensor, positions: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `combine_rows`: of rows and of weights, from that of its result, [t, h]; `order` is the reverse
    of `positions` for the pairs that have a row."""
    of_rows, of_weights = _spread_rows(grad.contiguous(), rows.contiguous(), positions, order, weights.contiguous())
    return of_rows, of_weights
