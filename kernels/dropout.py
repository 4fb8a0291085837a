"""residual + dropout(x): the mask is a function of (seed, row, column), and is never stored. An element is kept if its
random 32 bits are at least p 2^32. The bits are Philox 4x32-10 (Salmon et al. 2011) of the key `seed` and the counter
(column / 4, row, 0, 0), one output word for each of four neighbouring columns; backward and a recomputation draw the
same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable, rows_and_width

_BLOCK = 2048


@triton.jit
def _kept(seed, threshold, row, first, BLOCK: tl.constexpr):
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    a, b, c, d = tl.philox(seed, counter, zero + row.to(tl.uint32), zero, zero)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape([BLOCK])
    return bits >= threshold.to(tl.uint32)


@launchable
@triton.jit(do_not_specialize=["seed", "threshold"])
def _forward(
    x_ptr, residual_ptr, y_ptr, width, seed, threshold, scale, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    kept = _kept(seed, threshold, row, tl.program_id(1) * BLOCK, BLOCK)
    y = tl.where(kept, x * scale, 0.0) + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit(do_not_specialize=["seed", "threshold"])
def _backward(dy_ptr, dx_ptr, width, seed, threshold, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    kept = _kept(seed, threshold, row, tl.program_id(1) * BLOCK, BLOCK)
    dx = tl.where(kept, dy * scale, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor, residual: Tensor, *, seed: int, threshold: int, scale: float) -> Tensor:
    """residual + mask * x * scale. Returns like x.

    Args:
        x: [..., h] contiguous.
        residual: [..., h] contiguous.
        seed: 0 to 2^63 - 1.
        threshold: elements whose 32 random bits are below it are dropped.
        scale: what kept elements are multiplied by.
    """
    rows, width = rows_and_width(x)
    y = torch.empty_like(x)
    if x.numel():
        block = min(_BLOCK, block_of(width))
        _forward[(rows, blocks_of(width, block))](
            x, residual, y, width, seed, threshold, scale, BLOCK=block, num_warps=4
        )
    return y


def backward(dy: Tensor, *, seed: int, threshold: int, scale: float) -> Tensor:
    """The gradient of x; dy [..., h] contiguous."""
    rows, width = rows_and_width(dy)
    dx = torch.empty_like(dy)
    if dy.numel():
        block = min(_BLOCK, block_of(width))
        _backward[(rows, blocks_of(width, block))](dy, dx, width, seed, threshold, scale, BLOCK=block, num_warps=4)
    return dx
