"""Sums that are the same bits in whatever order, and over however many ranks, their terms are added.

Floating-point addition rounds, so that its result depends on the order of the terms, and the order on the layout.
Integer addition does not round. For `--reproducible`, gradients are therefore added as 64-bit multiples of a fixed
unit, and the squares of the norm as multiples of three units, each finer than the last. A unit of 2^-50 holds an fp32
gradient above 2^-26 to its last bit and any smaller one to 2^-51, which is finer than an fp32 sum would be.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

UNIT = 2.0**-50  # of a gradient entry, without the loss scale
LARGEST_SUM = 2.0**62  # in units: terms are refused that could add up to more, 4096
_SQUARE_UNITS = (2.0**-10, 2.0**-38, 2.0**-66)
_PIECE = {"cpu": 1 << 16}  # elements that are computed at a time: on a CPU their fp64 copies stay in its cache
_LARGE_PIECE = 1 << 22  # on other devices, where each operator is a launch
_MOST_PIECES = 256  # a plan traces the operators of every one
_LARGEST_PIECE = 1 << 26  # whose squares are added without rounding


def _pieces(flat: Tensor) -> Iterator[slice]:
    count = flat.numel()
    size = min(max(_PIECE.get(flat.device.type, _LARGE_PIECE), -(-count // _MOST_PIECES)), _LARGEST_PIECE)
    return (slice(start, start + size) for start in range(0, count, size))


def add_units(total: Tensor, x: Tensor, unit: float, *, has_terms: bool) -> Tensor:
    """Add terms, as whole multiples of `unit`, to a sum.

    Args:
        total: int64, flat, not empty.
        x: a term of as many entries, or several, stacked.
        has_terms: whether the sum holds terms already; otherwise it holds anything.

    Returns:
        The largest magnitude in x, a scalar that is not finite if an entry of x is not (the sum then means nothing).
    """
    terms, largest = x.reshape(-1, total.numel()), []
    for here in _pieces(total):
        part = terms[:, here]
        largest.append(part.abs().amax())
        multiples = in_units(part, unit)
        summed = multiples[0] if len(terms) == 1 else multiples.sum(0, dtype=torch.int64)
        if has_terms:
            total[here].add_(summed.to(torch.int64))
        else:
            total[here] = summed
    return largest[0] if len(largest) == 1 else torch.stack(largest).amax()


def in_units(x: Tensor, unit: float) -> Tensor:
    """The whole multiples of `unit` nearest to x, fp64."""
    return x.double().mul_(1.0 / unit).round_()


def from_units(multiples: Tensor, unit: float) -> Tensor:
    """The fp32 values nearest to `multiples` of `unit`, which are flat."""
    values = torch.empty_like(multiples, dtype=torch.float32)
    for here in _pieces(multiples):
        values[here] = multiples[here].double().mul_(unit)
    return values


def square_sum_units(tensor: Tensor) -> Tensor:
    """The sum of squares, as multiples of each of three units: int64 [3], to be added like any integers."""
    sums = torch.zeros(len(_SQUARE_UNITS), dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1)
    for here in _pieces(flat):
        rest = flat[here].double().square_()  # exact: an fp32 square has 48 bits
        for i, unit in enumerate(_SQUARE_UNITS):
            whole = (rest * (1.0 / unit)).round_()
            # After the first unit no multiple exceeds 2^27: fp64 adds those of a piece without rounding, and faster.
            sums[i] += whole.sum(dtype=torch.float64 if i else torch.int64).to(torch.int64)
            if i + 1 < len(_SQUARE_UNITS):
                rest.sub_(whole, alpha=unit)
    return sums


def square_sum_from_units(sums: Tensor) -> Tensor:
    """The fp64 scalar that `square_sum_units` represents."""
    total = torch.zeros((), dtype=torch.float64, device=sums.device)
    for multiples, unit in zip(sums.double(), _SQUARE_UNITS, strict=True):
        total += multiples * unit
    return total
