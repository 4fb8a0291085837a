"""Rotary position embedding: the first dimensions of every head turned in pairs, the rest copied; alone, or while
queries, keys and values are taken out of one projection."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable, power_of_two, warps_of

_TILE = 4096


@launchable
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    """Turn each pair (i, i + r/2) of a head's first r dimensions by its position's angle. `x`: [b, s, heads, d]; `cos`,
    `sin`: [s, r/2]; all contiguous. `backwards`: turn the other way, which is the gradient. Returns like x."""
    batch, positions, heads, size = x.shape
    half = cos.shape[1]
    y = torch.empty_like(x)
    if x.numel():
        block = block_of(half)
        tile = max(1, min(power_of_two(heads), _TILE // block))
        _rotate[(batch * positions, blocks_of(heads, tile))](
            x, cos, sin, y, positions, heads, size, half, -1.0 if backwards else 1.0,
            REST=block_of(size - 2 * half) if size > 2 * half else 0, HEADS=tile, HALF=block,
            num_warps=warps_of(tile * block, 512),
        )  # fmt: skip
    return y


@triton.jit
def _turning(cos_ptr, sin_ptr, positions, half, is_value, HALF: tl.constexpr):
    """Cosine and sine of a token's angles for each head, [HEADS, HALF]; those of angle 0 for values."""
    column = tl.arange(0, HALF)[None, :]
    angle = (tl.program_id(0) % positions) * half + column
    cos = tl.load(cos_ptr + angle, mask=column < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=column < half, other=0.0).to(tl.float32)
    return tl.where(is_value, 1.0, cos), tl.where(is_value, 0.0, sin)


@triton.jit
def _places(head, groups, size, SHARED: tl.constexpr):
    """Where heads of a token lie: in the packed tensor, among the queries, among keys or values."""
    token = tl.program_id(0).to(tl.int64)
    group, member = head // (SHARED + 2), head % (SHARED + 2)
    packed = (token * groups * (SHARED + 2) + head) * size
    return packed, (token * groups * SHARED + group * SHARED + member) * size, (token * groups + group) * size


@triton.jit
def _load_part(query, key, value, query_at, shared_at, column, inside, member, SHARED: tl.constexpr):
    """Columns of heads from where each lies, in fp32."""
    part = tl.load(query + query_at + column, mask=inside & (member < SHARED), other=0.0).to(tl.float32)
    part += tl.load(key + shared_at + column, mask=inside & (member == SHARED), other=0.0).to(tl.float32)
    return part + tl.load(value + shared_at + column, mask=inside & (member > SHARED), other=0.0).to(tl.float32)


@triton.jit
def _store_part(part, query, key, value, query_at, shared_at, column, inside, member, SHARED: tl.constexpr):
    """Columns of heads to where each lies."""
    tl.store(query + query_at + column, part, mask=inside & (member < SHARED))
    tl.store(key + shared_at + column, part, mask=inside & (member == SHARED))
    tl.store(value + shared_at + column, part, mask=inside & (member > SHARED))


@launchable
@triton.jit
def _split(
    packed_ptr, query, key, value, cos_ptr, sin_ptr, positions, groups, size, half,
    SHARED: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    member, exists = head % (SHARED + 2), head < groups * (SHARED + 2)
    packed_at, query_at, shared_at = _places(head, groups, size, SHARED)
    cos, sin = _turning(cos_ptr, sin_ptr, positions, half, member > SHARED, HALF)
    column = tl.arange(0, HALF)[None, :]
    inside = exists & (column < half)
    first = tl.load(packed_ptr + packed_at + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(packed_ptr + packed_at + half + column, mask=inside, other=0.0).to(tl.float32)
    kind = query.dtype.element_ty
    one, other = (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)
    _store_part(one, query, key, value, query_at, shared_at, column, inside, member, SHARED)
    _store_part(other, query, key, value, query_at, shared_at, half + column, inside, member, SHARED)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        inside = exists & (rest < size)
        copied = tl.load(packed_ptr + packed_at + rest, mask=inside, other=0.0)
        _store_part(copied, query, key, value, query_at, shared_at, rest, inside, member, SHARED)


@launchable
@triton.jit
def _join(
    packed_ptr, query, key, value, cos_ptr, sin_ptr, positions, groups, size, half,
    SHARED: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    member, exists = head % (SHARED + 2), head < groups * (SHARED + 2)
    packed_at, query_at, shared_at = _places(head, groups, size, SHARED)
    cos, sin = _turning(cos_ptr, sin_ptr, positions, half, member > SHARED, HALF)
    column = tl.arange(0, HALF)[None, :]
    inside = exists & (column < half)
    first = _load_part(query, key, value, query_at, shared_at, column, inside, member, SHARED)
    second = _load_part(query, key, value, query_at, shared_at, half + column, inside, member, SHARED)
    kind = packed_ptr.dtype.element_ty
    tl.store(packed_ptr + packed_at + column, (first * cos + second * sin).to(kind), mask=inside)
    tl.store(packed_ptr + packed_at + half + column, (second * cos - first * sin).to(kind), mask=inside)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        inside = exists & (rest < size)
        copied = _load_part(query, key, value, query_at, shared_at, rest, inside, member, SHARED)
        tl.store(packed_ptr + packed_at + rest, copied.to(kind), mask=inside)


def split(packed: Tensor, cos: Tensor, sin: Tensor, *, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned as by `rotate`, and values, out of one tensor. `packed`: [b, s, groups * (q + 2), d]
    contiguous: of each group its q queries, its key, its value. `cos`, `sin`: [s, r/2] contiguous. Returns queries [b,
    s, groups * q, d], keys and values [b, s, groups, d], contiguous."""
    batch, positions, heads, size = packed.shape
    query = packed.new_empty((batch, positions, heads - 2 * groups, size))
    key = packed.new_empty((batch, positions, groups, size))
    value = torch.empty_like(key)
    _launch(_split, packed, (query, key, value), cos, sin)
    return query, key, value


def join(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `split`'s input from those of its outputs, all contiguous."""
    batch, positions, groups, size = key.shape
    packed = key.new_empty((batch, positions, query.shape[2] + 2 * groups, size))
    _launch(_join, packed, (query, key, value), cos, sin)
    return packed


def _launch(kernel: Any, packed: Tensor, parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> None:
    batch, positions, heads, size = packed.shape
    groups, half = parts[1].shape[2], cos.shape[1]
    if not packed.numel():
        return
    block = block_of(half)
    tile = max(1, min(power_of_two(heads), _TILE // block))
    kernel[(batch * positions, blocks_of(heads, tile))](
        packed, *parts, cos, sin, positions, groups, size, half,
        SHARED=heads // groups - 2, REST=block_of(size - 2 * half) if size > 2 * half else 0, HEADS=tile, HALF=block,
        num_warps=warps_of(tile * block, 512),
    )  # fmt: skip
