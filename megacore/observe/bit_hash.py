"""A 64-bit hash of the bits of a tensor, computed where the tensor lies, without waiting for an accelerator.

The tensor is read as integers x[i] of its element size (8 bytes as two of 4). The hash is the sum of w[i] * x[i] modulo
2^64 with fixed random odd weights, a universal hash (Carter and Wegman 1979). A sum of integers wraps around, so that
its order, and how many threads share it, cannot matter. Of two tensors of one shape and dtype:

- if they differ in one element, in any of its bits, the hashes differ: an odd weight has an inverse;
- if two elements of one row of 2^14 are swapped, the hashes differ: the weights of a row differ modulo 2^33;
- any other difference goes unnoticed with a probability of at most 2^-26 over the choice of the weights, and of about
  2^-57 if it changes the lowest bit of any element.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

_ROW = 1 << 14
# Rows in one operator: the products of a processor's stay in its cache, and a device's are many enough to fill it.
_ROWS_ON_CPU, _ROWS_ON_DEVICE = 4, 128
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """The hash, an int64 scalar on the tensor's device."""
    elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    full, rest = divmod(elements.numel(), _ROW)
    within, of_rows = odd_numbers(0, _ROW, elements.device), odd_numbers(1, full + 1, elements.device)
    total = (elements[full * _ROW :] * within[:rest]).sum() * of_rows[full]
    rows = elements[: full * _ROW].view(full, _ROW)
    step = _ROWS_ON_CPU if elements.device.type == "cpu" else _ROWS_ON_DEVICE
    for first in range(0, full, step):
        sums = (rows[first : first + step] * within).sum(1)
        total += (sums * of_rows[first : first + len(sums)]).sum()
    return total


def odd_numbers(stream: int, count: int, device: torch.device) -> Tensor:
    """At least `count` odd int64 numbers, the first of a fixed sequence."""
    return _odd_numbers(stream, 1 << (count - 1).bit_length(), device)


@functools.lru_cache(maxsize=64)
def _odd_numbers(stream: int, count: int, device: torch.device) -> Tensor:
    drawn = np.random.Philox(key=stream).random_raw(count) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
