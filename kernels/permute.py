"""Rows of tokens for each expert that they use, and back: a copy, and a weighted sum in fp32, without tensors between.
Shape legend: t tokens, k choices of a token, r rows, of chosen pairs of a token and an expert, h width of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable

_BLOCK, _BLOCK_OF_GRADIENTS = 2048, 1024


@launchable
@triton.jit
def _gather(x_ptr, order_ptr, y_ptr, width, chosen, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(order_ptr + row) // chosen
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + source * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, x.to(y_ptr.dtype.element_ty), mask=column < width)


@launchable
@triton.jit
def _combine(
    rows_ptr, positions_ptr, weights_ptr, y_ptr, width, rows,
    CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(CHOSEN):
        row = tl.load(positions_ptr + token * CHOSEN + number)
        x = tl.load(rows_ptr + row * width + column, mask=(column < width) & (row < rows), other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weights_ptr + token * CHOSEN + number)
        total += x
    tl.store(y_ptr + token * width + column, total.to(y_ptr.dtype.element_ty), mask=column < width)


@launchable
@triton.jit
def _spread(
    grad_ptr, rows_ptr, positions_ptr, weights_ptr, d_rows_ptr, d_weights_ptr, width, chosen, rows, BLOCK: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(positions_ptr + pair)
    weight = tl.load(weights_ptr + pair)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + pair // chosen * width + column, mask=column < width, other=0.0).to(tl.float32)
        inside = (column < width) & (row < rows)
        x = tl.load(rows_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_rows_ptr + row * width + column, (grad * weight).to(d_rows_ptr.dtype.element_ty), mask=inside)
        total += grad * x
    tl.store(d_weights_ptr + pair, tl.sum(total, 0))


def gather(tokens: Tensor, order: Tensor, chosen: int) -> Tensor:
    """A row for each pair of a token and one of its k choices. `tokens`: [t, h] contiguous. `order`: [r] int64: which
    pair each row is; pair p is of token p // k. `chosen`: k. Returns [r, h]."""
    assert tokens.is_contiguous() and order.is_contiguous()
    width = tokens.shape[1]
    rows = tokens.new_empty(len(order), width)
    if rows.numel():
        block = min(_BLOCK, block_of(width))
        _gather[(len(order), blocks_of(width, block))](tokens, order, rows, width, chosen, BLOCK=block, num_warps=4)
    return rows


def combine(rows: Tensor, positions: Tensor, weights: Tensor | None, chosen: int) -> Tensor:
    """[r, h] -> [t, h]: the sum of each token's `chosen` rows, or their weighted sum, in fp32 and in the order of its
    pairs. `positions`: [t k] int64: the row of each pair; r where it has none. `weights`: [t, k] fp32; None: all are 1.
    All are contiguous."""
    assert rows.is_contiguous() and positions.is_contiguous()
    width = rows.shape[1]
    y = rows.new_empty(len(positions) // chosen, width)
    if y.numel():
        block = min(_BLOCK, block_of(width))
        _combine[(len(y), blocks_of(width, block))](
            rows, positions, positions if weights is None else weights, y, width, len(rows),
            CHOSEN=chosen, WEIGHTED=weights is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return y


def spread(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `combine`: of rows [r, h], and of weights [t, k] fp32; from that of its result [t, h]."""
    assert all(x.is_contiguous() for x in (grad, rows, positions, weights))
    d_rows, d_weights = torch.empty_like(rows), torch.empty_like(weights)
    if grad.numel():
        width = rows.shape[1]
        block = min(_BLOCK_OF_GRADIENTS, block_of(width))
        _spread[(len(positions),)](
            grad,
            rows,
            positions,
            weights,
            d_rows,
            d_weights,
            width,
            weights.shape[1],
            len(rows),
            BLOCK=block,
            num_warps=4,
        )
    return d_rows, d_weights
