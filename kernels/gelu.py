"""GELU in its tanh form with the bias before it folded in; 0.5 (1 + tanh u) is computed as sigmoid(2 u). With a bias,
backward adds up the bias gradient while it computes that of x, which nothing then reads for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable, processors, rows_and_width

_BLOCK = 2048
# Of backward with a bias: a tile of rows and columns, in which a warp holds one row, 128 bits a thread; programs that a
# processor holds at once; and rows enough for a program that its sums of 32 bits are few beside what it moves.
_ROWS, _COLUMNS, _PROGRAMS_EACH, _ROWS_PER_SHARE = 4, 256, 8, 64


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


@triton.jit
def _gradient(dy, x):
    square = x * x
    sigmoid = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553484 * square))
    slope = x * (1.5957691216057308 + 0.21406443847660453 * square)
    return dy * sigmoid * (1.0 + slope * (1.0 - sigmoid))


@launchable
@triton.jit
def _backward(dy_ptr, x_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dx = _gradient(dy, x)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit
def _backward_biased(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows, width, rows_per_share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.program_id(1)
    first = share * rows_per_share
    last = tl.minimum(first + rows_per_share, rows)
    inside_row = column < width
    bias = tl.load(bias_ptr + column, mask=inside_row, other=0.0).to(tl.float32)[None, :]
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row < last)[:, None] & inside_row[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx = _gradient(dy, x)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dbias += dx
    tl.store(dbias_ptr + share * width + column, tl.sum(dbias, 0), mask=inside_row)


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


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of x where there is no bias; dy [..., f] contiguous."""
    rows, width = rows_and_width(x)
    dx = torch.empty_like(x)
    if x.numel():
        block = min(_BLOCK, block_of(width))
        _backward[(rows, blocks_of(width, block))](dy, x, dx, width, BLOCK=block, num_warps=4)
    return dx


def backward_biased(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias. The rows are divided into shares. Each program adds up the bias gradient of its
    share and columns in registers; the sums of the shares are then added in a fixed order. `dy`: [..., f] contiguous.
    `x`: [..., f] contiguous. `bias`: [f]. Returns dx [..., f] and dbias [f], of x's dtype."""
    rows, width = rows_and_width(x)
    dx = torch.empty_like(x)
    tiles = blocks_of(width, _COLUMNS)
    shares = max(1, min(blocks_of(rows, _ROWS_PER_SHARE), blocks_of(_PROGRAMS_EACH * processors(x.device), tiles)))
    dbias = x.new_empty((shares, width), dtype=torch.float32)
    if rows:
        _backward_biased[(tiles, shares)](
            dy, x, bias, dx, dbias, rows, width, blocks_of(rows, shares), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
        )  # fmt: skip
    else:
        dbias.zero_()
    return dx, dbias.sum(0).to(x.dtype)
