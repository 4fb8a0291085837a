"""Rotary position embedding: the first dimensions of every head turned in pairs, the rest copied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, on_its_device, warps_of

_TILE = 4096


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, positions, heads, size, half, sign,
    REST: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)
    angle = (token % positions) * half + column
    cos = tl.load(cos_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :] * sign
    at = token.to(tl.int64) * heads * size + head * size + column[None, :]
    inside = (head < heads) & (column < half)[None, :]
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    kind = y_ptr.dtype.element_ty
    tl.store(y_ptr + at, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(y_ptr + at + half, (second * cos + first * sin).to(kind), mask=inside)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        at = token.to(tl.int64) * heads * size + head * size + rest
        inside = (head < heads) & (rest < size)
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=inside, other=0.0), mask=inside)


@on_its_device
def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    """Turn each pair (i, i + r/2) of a head's first r dimensions by its position's angle.

    Args:
        x: [b, s, heads, d] contiguous.
        cos: [s, r/2] contiguous.
        sin: [s, r/2] contiguous.
        backwards: turn the other way, which is the gradient.

    Returns:
        Like x.
    """
    batch, positions, heads, size = x.shape
    half = cos.shape[1]
    y = torch.empty_like(x)
    if x.numel():
        block = block_of(half)
        tile = max(1, min(triton.next_power_of_2(heads), _TILE // block))
        _rotate[(batch * positions, triton.cdiv(heads, tile))](
            x, cos, sin, y, positions, heads, size, half, -1.0 if backwards else 1.0,
            REST=block_of(size - 2 * half) if size > 2 * half else 0, HEADS=tile, HALF=block,
            num_warps=warps_of(tile * block, 512),
        )  # fmt: skip
    return y
