"""Softmax of attention scores with the scale and the masks folded in: one read and one write of the scores.

A key is seen by a query if it is not later (causal, with any offset between the two) and within the window. What is not
seen is not read: the load's mask is rounded to 16 columns, which keeps loads of 128 bits, and the exact condition is
applied to what was loaded. Masked weights are exactly 0, and so is a row that sees nothing. Rows up to `ONE_BLOCK` stay
in registers; longer ones are read twice, with a running maximum and sum (Milakov and Gimelshein 2018, arXiv
1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import aligned, block_of, launchable, warps_of

# Columns that the registers of a program hold: of rows that begin at multiples of 16 elements, and of others.
ONE_BLOCK = {True: 16384, False: 8192}
_CHUNK = 4096


@triton.jit
def _bounds(query, sk, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    last = sk
    if CAUSAL:
        last = tl.maximum(tl.minimum(query + offset + 1, sk), 0)
    first = 0
    if WINDOW:
        first = tl.maximum(query + offset + 1 - window, 0)
    return first, last


@triton.jit
def _touched(columns, sk, first, last, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The columns to load: what is seen, rounded outwards to 16."""
    touched = columns < sk
    if CAUSAL:
        touched &= columns // 16 * 16 < last
    if WINDOW:
        touched &= columns // 16 * 16 + 15 >= first
    return touched


@triton.jit
def _scores(x_ptr, columns, touched, first, last, scale, MASKED: tl.constexpr):
    """Scaled scores, -inf where a key is not seen."""
    x = tl.load(x_ptr + columns, mask=touched, other=float("-inf")).to(tl.float32) * scale
    if MASKED:
        x = tl.where((columns >= first) & (columns < last), x, float("-inf"))
    return x


@launchable
@triton.jit
def _forward(
    x_ptr, y_ptr, sq, sk, offset, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    first, last = _bounds(row % sq, sk, offset, window, CAUSAL, WINDOW)
    touched = _touched(columns, sk, first, last, CAUSAL, WINDOW)
    at = row.to(tl.int64) * sk
    x = _scores(x_ptr + at, columns, touched, first, last, scale, CAUSAL or WINDOW)
    # Where columns >= sk, x is -inf too: the load gave it. scale > 0 keeps it so.
    peak = tl.max(x, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    y = tl.exp(x - peak)
    total = tl.sum(y, 0)
    y = y / tl.where(total == 0.0, 1.0, total)
    tl.store(y_ptr + at + columns, y.to(y_ptr.dtype.element_ty), mask=columns < sk)


@launchable
@triton.jit
def _forward_long(
    x_ptr, y_ptr, sq, sk, offset, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first, last = _bounds(row % sq, sk, offset, window, CAUSAL, WINDOW)
    at = row.to(tl.int64) * sk
    begin = first // BLOCK * BLOCK
    peak = float("-inf")
    total = 0.0
    for start in range(begin, last, BLOCK):
        columns = start + lanes
        touched = _touched(columns, sk, first, last, CAUSAL, WINDOW)
        x = _scores(x_ptr + at, columns, touched, first, last, scale, CAUSAL or WINDOW)
        higher = tl.maximum(peak, tl.max(x, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(x - safe), 0)
        peak = higher
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, sk, BLOCK):
        columns = start + lanes
        touched = _touched(columns, sk, first, last, CAUSAL, WINDOW)
        x = _scores(x_ptr + at, columns, touched, first, last, scale, CAUSAL or WINDOW)
        y = tl.exp(x - peak) / total
        tl.store(y_ptr + at + columns, y.to(y_ptr.dtype.element_ty), mask=columns < sk)


@launchable
@triton.jit
def _backward(
    dy_ptr, y_ptr, dx_ptr, sq, sk, offset, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    first, last = _bounds(row % sq, sk, offset, window, CAUSAL, WINDOW)
    touched = _touched(columns, sk, first, last, CAUSAL, WINDOW)
    at = row.to(tl.int64) * sk + columns
    y = tl.load(y_ptr + at, mask=touched, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=touched, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 0)) * scale
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=columns < sk)


@launchable
@triton.jit
def _backward_long(
    dy_ptr, y_ptr, dx_ptr, sq, sk, offset, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first, last = _bounds(row % sq, sk, offset, window, CAUSAL, WINDOW)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(first // BLOCK * BLOCK, last, BLOCK):
        columns = start + lanes
        touched = _touched(columns, sk, first, last, CAUSAL, WINDOW)
        at = row.to(tl.int64) * sk + columns
        y = tl.load(y_ptr + at, mask=touched, other=0.0).to(tl.float32)
        products += y * tl.load(dy_ptr + at, mask=touched, other=0.0).to(tl.float32)
    product = tl.sum(products, 0)
    for start in range(0, sk, BLOCK):
        columns = start + lanes
        touched = _touched(columns, sk, first, last, CAUSAL, WINDOW)
        at = row.to(tl.int64) * sk + columns
        y = tl.load(y_ptr + at, mask=touched, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=touched, other=0.0).to(tl.float32)
        dx = y * (dy - product) * scale
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=columns < sk)


def forward(x: Tensor, *, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    """Attention weights of scores. `x`: [b, heads, sq, sk] contiguous. `causal`: query i sees keys up to i + offset.
    `window`: query i sees keys after i + offset - window alone; None: no such limit. Returns like x; rows sum to 1, or
    are 0 where nothing is seen."""
    _, _, sq, sk = x.shape
    y = torch.empty_like(x)
    if x.numel():
        long = sk > ONE_BLOCK[aligned(sk)]
        block = _CHUNK if long else block_of(sk)
        (_forward_long if long else _forward)[(x.numel() // sk,)](
            x, y, sq, sk, offset, 0 if window is None else window, scale,
            CAUSAL=causal, WINDOW=window is not None, BLOCK=block, num_warps=warps_of(block, 512, most=32),
        )  # fmt: skip
    return y


def backward(dy: Tensor, y: Tensor, *, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    """The scores' gradient, like y; 0 where a key is not seen. `y`: [b, heads, sq, sk], what `forward` returned. `dy`:
    like y, contiguous. `causal`: lets the kernel skip what is 0. The others are as in `forward`."""
    _, _, sq, sk = y.shape
    dx = torch.empty_like(y)
    if y.numel():
        long = sk > ONE_BLOCK[aligned(sk)]
        block = _CHUNK if long else block_of(sk)
        (_backward_long if long else _backward)[(y.numel() // sk,)](
            dy, y, dx, sq, sk, offset, 0 if window is None else window, scale,
            CAUSAL=causal, WINDOW=window is not None, BLOCK=block, num_warps=warps_of(block, 512, most=32),
        )  # fmt: skip
    return dx
