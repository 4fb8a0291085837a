"""Causal attention without other masks on CPUs, by torch's fused operator, which needs no mask for it.

The operator computes scores in blocks of up to 512 keys, whole: many lie above the diagonal, where nothing is seen.
Cutting the positions in halves, and these again, leaves such scores in the smallest blocks only: a second half sees
all of its first half, and the blocks on the diagonal see themselves. Blocks of one size are one call, as further
samples of the batch. Results over some of the keys are merged by the logarithms of their sums.

Shape legend: b micro-batch, n heads, g key and value heads, q queries, k keys, s as many of both, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import has_whole_heads

SMALLEST = 128
"""Positions of a block on the diagonal, at least: smaller ones cost more in calls than they save in scores."""

Operands = tuple[Tensor, Tensor, Tensor]


def fused(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """torch's operator for CPUs, which does not look at the stride of the last dimension."""
    assert has_whole_heads(query, key, value), "the dimensions of a head must lie side by side"
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, **options
    )
    return found


def fused_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *others: Any, **options: Any
) -> Operands:
    """Its gradient; `d_out` may have any strides."""
    assert has_whole_heads(query, key, value, out), "the dimensions of a head must lie side by side"
    found: Operands = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, query, key, value, out, *others, **options
    )
    return found


def attend_causally(operands: Operands, offset: int) -> tuple[Tensor, Tensor]:
    """Attention in fp32, and the logarithms of its softmax's sums. `operands`: query [b, n, q, d], key and value [b, g,
    k, d]; any strides, the last dimension contiguous. `offset`: position of the first query, counted from the first
    key. Returns [b, n, q, d], laid out as [b, q, n, d], and [b, n, q]."""
    query, key, value = (x.float() for x in operands)
    before, seen = _cuts(query, key, offset)
    earlier = query, key[:, :, :before], value[:, :, :before]
    if before == seen:
        out, logarithm = fused(*earlier)
        return laid_out(out), logarithm
    out, logarithm = _triangle(query, key[:, :, before:seen], value[:, :, before:seen])
    if before:
        merge_(out, logarithm, *fused(*earlier))
    return out, logarithm


def attend_causally_backward(
    d_out: Tensor, operands: Operands, out: Tensor, logarithm: Tensor, offset: int
) -> Operands:
    """The gradients of queries, keys and values in fp32, laid out as [b, s, heads, d]. `d_out`, `out`: [b, n, q, d], of
    the result over all keys, of which `operands` may have a part; `logarithm`: [b, n, q] fp32, of its sums. The others
    are as for `attend_causally`."""
    d_out, query, key, value, out = (x.float() for x in (d_out, *operands, out))
    before, seen = _cuts(query, key, offset)
    found = []
    if before < seen:
        beside = query, key[:, :, before:seen], value[:, :, before:seen]
        found.append((slice(before, seen), _triangle_backward(d_out, beside, out, logarithm)))
    if before:
        earlier = query, key[:, :, :before], value[:, :, :before]
        found.append((slice(before), fused_backward(d_out, *earlier, out, logarithm, 0.0, False)))
    if len(found) == 1 and seen == key.shape[2]:
        return _all_laid_out(found[0][1])
    d_query = found[0][1][0]
    for _, gradients in found[1:]:
        d_query = d_query.add_(gradients[0])
    d_key, d_value = (like_projection(x).zero_() for x in (key, value))
    for keys, gradients in found:
        d_key[:, :, keys] = gradients[1]
        d_value[:, :, keys] = gradients[2]
    return laid_out(d_query), d_key, d_value


def _cuts(query: Tensor, key: Tensor, offset: int) -> tuple[int, int]:
    """How many keys lie before the queries, and how many are seen: those from the one to the other lie beside them."""
    return min(offset, key.shape[2]), min(offset + query.shape[2], key.shape[2])


def merge_(out: Tensor, logarithm: Tensor, part: Tensor, sums: Tensor) -> None:
    """Add attention over further keys, in place: each weighs as much as its share of the sum of both. `out`: [b, n, q,
    d] fp32. `logarithm`: [b, n, q] fp32, of the sums so far."""
    out.lerp_(part, torch.sigmoid(sums - logarithm)[..., None])
    logarithm.copy_(torch.logaddexp(logarithm, sums))


# ---- queries beside as many keys


def _triangle(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As `attend_causally`, where each query stands at a key, or behind the last one."""
    size = _smallest_block(query, key)
    if size is None:
        out, logarithm = fused(query, key, value, is_causal=True)
        return laid_out(out), logarithm
    blocks = fused(*(_blocks(x, size) for x in (query, key, value)), is_causal=True)
    out, logarithm = (_joined(x, query.shape[0]) for x in blocks)
    while size < query.shape[2]:
        operands = _half(query, size, 1), _half(key, size, 0), _half(value, size, 0)
        merge_(_half(out, size, 1), _half(logarithm, size, 1), *fused(*operands))
        size *= 2
    return out, logarithm


def _triangle_backward(d_out: Tensor, operands: Operands, out: Tensor, logarithm: Tensor) -> Operands:
    query, key, value = operands
    size = _smallest_block(query, key)
    if size is None:
        return _all_laid_out(fused_backward(d_out, *operands, out, logarithm, 0.0, True))
    blocks = (_blocks(x, size) for x in (d_out, *operands, out, logarithm))
    d_query, d_key, d_value = (_joined(x, query.shape[0]) for x in fused_backward(*blocks, 0.0, True))
    while size < query.shape[2]:
        halves = ((d_out, 1), (query, 1), (key, 0), (value, 0), (out, 1), (logarithm, 1))
        gradients = fused_backward(*(_half(x, size, half) for x, half in halves), 0.0, False)
        for total, half, gradient in zip((d_query, d_key, d_value), (1, 0, 0), gradients, strict=True):
            _half(total, size, half).add_(gradient)
        size *= 2
    return d_query, d_key, d_value


def _smallest_block(query: Tensor, key: Tensor) -> int | None:
    """Positions of the blocks on the diagonal; None: one block."""
    size = query.shape[2]
    if key.shape[2] != size or size < 2 * SMALLEST:
        return None
    while size % 2 == 0 and size >= 2 * SMALLEST:
        size //= 2
    return size if size < query.shape[2] else None


def _blocks(x: Tensor, size: int) -> Tensor:
    """[b, heads, s, ...] -> [b s/size, heads, size, ...]"""
    return x.transpose(1, 2).unflatten(1, (-1, size)).flatten(0, 1).transpose(1, 2)


def _joined(blocks: Tensor, batch: int) -> Tensor:
    """[b s/size, heads, size, ...] -> [b, heads, s, ...], laid out as [b, s, heads, ...]"""
    return blocks.transpose(1, 2).contiguous().unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)


def _half(x: Tensor, size: int, half: int) -> Tensor:
    """The first or the second blocks of pairs: [b, heads, s, ...] -> [b s/(2 size), heads, size, ...], a view."""
    return x.transpose(1, 2).unflatten(1, (-1, 2, size))[:, :, half].flatten(0, 1).transpose(1, 2)


# ---- layouts


def like_projection(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, of x's shape [b, heads, s, d], laid out as projections read and write it: [b, s, heads, d]."""
    b, heads, s, d = x.shape
    return x.new_empty((b, s, heads, d), dtype=dtype).transpose(1, 2)


def laid_out(x: Tensor) -> Tensor:
    """Like `like_projection`, with x's values."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _all_laid_out(gradients: Operands) -> Operands:
    d_query, d_key, d_value = (laid_out(gradient) for gradient in gradients)
    return d_query, d_key, d_value
