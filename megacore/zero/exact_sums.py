"""Sums that are the same bits in whatever order, and over however many ranks, their terms are added.

Floating-point addition rounds, so that its result depends on the order of the terms, and the order on the layout.
Integer addition does not round. For `--reproducible`, gradients are therefore added as 64-bit multiples of a fixed
unit, and the squares of the norm as multiples of three units, each finer than the last. A unit of 2^-50 holds an fp32
gradient above 2^-26 to its last bit and any smaller one to 2^-51, which is finer than an fp32 sum would be.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-50  # of a gradient entry, without the loss scale
LARGEST_SUM = 2.0**62  # in units: terms are refused that could add up to more, 4096
_SQUARE_UNITS = (2.0**-10, 2.0**-38, 2.0**-66)
_CHUNK = 1 << 22  # elements that are squared at a time: three fp64 copies exist meanwhile


def to_units(x: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """x as whole multiples of `unit`. Returns the multiples, int64 of x's shape; and the largest magnitude among them,
    an fp64 scalar that is not finite if an entry of x is not (the multiples then mean nothing)."""
    multiples = x.double().div_(unit).round_()
    largest = multiples.abs().amax() if x.numel() else multiples.new_zeros(())
    return multiples.to(torch.int64), largest


def from_units(multiples: Tensor, unit: float) -> Tensor:
    """The fp32 values nearest to `multiples` of `unit`."""
    return multiples.double().mul_(unit).float()


def square_sum_units(tensor: Tensor) -> Tensor:
    """The sum of squares, as multiples of each of three units: int64 [3], to be added like any integers."""
    sums = torch.zeros(len(_SQUARE_UNITS), dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        rest = flat[start : start + _CHUNK].double().square_()  # exact: an fp32 square has 48 bits
        for i, unit in enumerate(_SQUARE_UNITS):
            whole = (rest / unit).round_()
            sums[i] += whole.to(torch.int64).sum()
            rest -= whole.mul_(unit)
    return sums


def square_sum_from_units(sums: Tensor) -> Tensor:
    """The fp64 scalar that `square_sum_units` represents."""
    total = torch.zeros((), dtype=torch.float64, device=sums.device)
    for multiples, unit in zip(sums.double(), _SQUARE_UNITS, strict=True):
        total += multiples * unit
    return total
