"""GELU in its tanh form with the bias before it folded in; 0.5 (1 + tanh u) is computed as sigmoid(2 u)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable, rows_and_width

_BLOCK = 2048


@launchable
@triton.jit
def _forward(x_ptr, bias_ptr, y_ptr, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    # 2 sqrt(2 / pi) and its product with 0.044715
    y = x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553484 * x * x))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit
def _backward(dy_ptr, x_ptr, bias_ptr, dx_ptr, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    square = x * x
    sigmoid = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553484 * square))
    slope = x * (1.5957691216057308 + 0.21406443847660453 * square)
    dx = dy * sigmoid * (1.0 + slope * (1.0 - sigmoid))
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias): x [..., f] contiguous, bias [f] or None; like x."""
    rows, width = rows_and_width(x)
    y = torch.empty_like(x)
    if x.numel():
        block = min(_BLOCK, block_of(width))
        _forward[(rows, blocks_of(width, block))](
            x, bias, y, width, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4
        )
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient of x, which summed over rows is that of the bias; dy [..., f] contiguous."""
    rows, width = rows_and_width(x)
    dx = torch.empty_like(x)
    if x.numel():
        block = min(_BLOCK, block_of(width))
        _backward[(rows, blocks_of(width, block))](
            dy, x, bias, dx, width, HAS_BIAS=bias is not None, BLOCK=block, num_warps=4
        )
    return dx
