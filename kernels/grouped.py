"""Products of rows with the matrix of their group: linear layers of many experts, each with other rows, in one launch.
Rows of a group follow each other. A program computes a tile of the result, of rows of one group only; which group and
which rows a tile has comes from a table, so that programs need not search. Sums are in fp32. Shape legend: r rows, E
groups, i input features, o output features, T tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import blocks_of, interpreting, launchable

_TILES_TOGETHER = 8  # tiles of rows whose programs run side by side, so that they share what they read of a matrix


@launchable
@triton.jit
def _products(
    x_ptr, w_ptr, y_ptr, tiles_ptr, tiles, width, depth, w_group, w_column, w_inner,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    together = TOGETHER * tl.cdiv(width, N)
    first = program // together * TOGETHER
    here = tl.minimum(tiles - first, TOGETHER)
    tile = first + program % together % here
    column = program % together // here * N + tl.arange(0, N)
    group = tl.load(tiles_ptr + 3 * tile).to(tl.int64)
    row = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, M)
    is_row = row < tl.load(tiles_ptr + 3 * tile + 2)
    inner = tl.arange(0, K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * depth + inner[None, :]
    w_at = w_ptr + group * w_group + column.to(tl.int64)[None, :] * w_column + inner.to(tl.int64)[:, None] * w_inner
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, depth, K):
        left = inner < depth - start
        x = tl.load(x_at, mask=is_row[:, None] & left[None, :], other=0.0)
        w = tl.load(w_at, mask=left[:, None] & (column < width)[None, :], other=0.0)
        if WIDE:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_at += K
        w_at += K * w_inner
    y_at = y_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (column < width)[None, :])


@launchable
@triton.jit
def _weight_gradients(
    grad_ptr, x_ptr, total_ptr, bounds_ptr, outputs, inputs,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(inputs, N)
    output = tl.program_id(0) // blocks * M + tl.arange(0, M)
    column = tl.program_id(0) % blocks * N + tl.arange(0, N)
    group = tl.program_id(1).to(tl.int64)
    start = tl.load(bounds_ptr + group)
    stop = tl.load(bounds_ptr + group + 1)
    total = tl.zeros((M, N), tl.float32)
    for first in range(start, stop, K):
        row = first + tl.arange(0, K)
        is_row = (row < stop)[:, None]
        grad = tl.load(
            grad_ptr + row.to(tl.int64)[:, None] * outputs + output[None, :],
            mask=is_row & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * inputs + column[None, :],
            mask=is_row & (column < inputs)[None, :], other=0.0,
        )  # fmt: skip
        if WIDE:
            grad = grad.to(tl.float32)
            x = x.to(tl.float32)
        total = tl.dot(tl.trans(grad), x, total, input_precision="ieee")
    at = total_ptr + (group * outputs + output[:, None]) * inputs + column[None, :]
    inside = (output < outputs)[:, None] & (column < inputs)[None, :]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(total_ptr.dtype.element_ty), mask=inside)


def rows_of_tile(dtype: torch.dtype) -> int:
    """Rows of a group that a program computes with at once."""
    return _blocks(dtype)["M"]


def products(x: Tensor, weight: Tensor, tiles: Tensor, *, transposed: bool) -> Tensor:
    """x W^T of each group, [r, i] and [E, o, i] -> [r, o]; or, `transposed`, x W, [r, o] -> [r, i]. `x`: contiguous.
    `weight`: contiguous, of x's dtype. `tiles`: [T, 3] int32 contiguous: of each tile its group, its first row, and the
    end of the group's rows; a tile has `rows_of_tile` rows, or those that are left. Every row is in one of them."""
    outputs, inputs = weight.shape[1:]
    width, depth = (inputs, outputs) if transposed else (outputs, inputs)
    y = x.new_empty(len(x), width)
    if y.numel():
        blocks = _blocks(x.dtype)
        w_column, w_inner = (1, inputs) if transposed else (inputs, 1)
        _products[(len(tiles) * blocks_of(width, blocks["N"]),)](
            x, weight, y, tiles, len(tiles), width, depth, outputs * inputs, w_column, w_inner,
            TOGETHER=_TILES_TOGETHER, WIDE=interpreting(), **blocks,
        )  # fmt: skip
    return y


def weight_gradients(grad: Tensor, x: Tensor, total: Tensor, bounds: Tensor, *, add: bool) -> None:
    """total = dY^T X of each group, [r, o] and [r, i] -> [E, o, i]; 0 of a group without rows.

    Args:
        grad: contiguous.
        x: contiguous, of grad's dtype.
        total: contiguous; fp32 or of grad's dtype.
        bounds: [E + 1] int32: where the rows of each group begin, and the end of the last.
        add: the products are added to what `total` holds.
    """
    groups, outputs, inputs = total.shape
    blocks = _blocks(x.dtype)
    grid = (blocks_of(outputs, blocks["M"]) * blocks_of(inputs, blocks["N"]), groups)
    _weight_gradients[grid](grad, x, total, bounds, outputs, inputs, ADD=add, WIDE=interpreting(), **blocks)


def _blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Rows, columns and depth of a tile: what the registers hold of its sums."""
    if interpreting():
        return {"M": 16, "N": 32, "K": 32, "num_warps": 4}
    if dtype == torch.float32:
        return {"M": 64, "N": 64, "K": 32, "num_warps": 8}
    return {"M": 128, "N": 128, "K": 64, "num_warps": 8}
