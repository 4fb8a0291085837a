"""Attention that writes neither scores nor masks: causal, windows, packed documents, ALiBi, shared key and value heads.

A program takes a block of queries, loops over the blocks of keys that it may see, and keeps the softmax's maximum and
sum as it goes (Dao et al. 2022, arXiv 2205.14135). Backward computes the scores again from the logarithms of the sums:
one kernel for the gradient of queries, and one for those of keys and values, whose programs loop over all queries that
share a key. No atomics: the bits are the same every time. A block of keys whose documents are not the queries' is
skipped by the numbers that the device reads; the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, interpreting, launchable

_LOWEST = tl.constexpr(-1e30)  # below every score, and finite: differences of two are numbers


@triton.jit
def _load(x_ptr, batch, head, row, column, x_batch, x_head, x_row, inside, WIDE: tl.constexpr):
    """Rows of a head; in fp32 where Triton's interpreter runs, which cannot multiply 16-bit numbers."""
    at = x_ptr + batch * x_batch + head * x_head + row[:, None] * x_row + column[None, :]
    x = tl.load(at, mask=inside, other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _documents(documents_ptr, batch, documents_batch, position, exists, DOCUMENTS: tl.constexpr):
    """The documents of positions; without documents something that nothing reads."""
    documents = position
    if DOCUMENTS:
        documents = tl.load(documents_ptr + batch * documents_batch + position, mask=exists, other=0)
    return documents


@triton.jit
def _keys_of_block(offset, keys, reach, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The first and the last key that the program's block of queries may see."""
    first, last = 0, keys
    if CAUSAL:
        last = tl.minimum(keys, offset + (tl.program_id(0) + 1) * M)
    if WINDOW:
        first = tl.maximum(offset + tl.program_id(0) * M - reach + 1, 0) // N * N
        last = tl.minimum(last, offset + (tl.program_id(0) + 1) * M + reach - 1)
    return first, last


@triton.jit
def _scores(
    q, k, scale, query, key, ours, theirs, slope, queries, keys, reach,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Scores with ALiBi's term, and the lowest number where a key is not seen; queries are rows."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    distance = query[:, None] - key[None, :]
    seen = (query < queries)[:, None] & (key < keys)[None, :]
    if CAUSAL:
        seen &= distance >= 0
    if WINDOW:
        seen &= tl.abs(distance) < reach
    if DOCUMENTS:
        seen &= ours[:, None] == theirs[None, :]
    if ALIBI:
        scores -= slope * tl.abs(distance).to(tl.float32)
    return tl.where(seen, scores, _LOWEST)


@triton.jit
def _weights(scores, logarithm):
    """What the softmax made of scores, whose logarithm of the sum of each row is known."""
    return tl.where(scores > _LOWEST, tl.exp(scores - logarithm[:, None]), 0.0)


@triton.jit
def _touches(ours, theirs, DOCUMENTS: tl.constexpr):
    """Whether two blocks may hold positions of the same document."""
    touches = True
    if DOCUMENTS:
        touches = (tl.min(ours, 0) <= tl.max(theirs, 0)) & (tl.min(theirs, 0) <= tl.max(ours, 0))
    return touches


@launchable
@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, logarithm_ptr, documents_ptr, slopes_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    queries, keys, offset, reach, heads, size, scale, documents_batch,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, ALIBI: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    query, inside = offset + row, (row < queries)[:, None] & (column < size)[None, :]
    q = _load(q_ptr, batch, head, row, column, q_batch, q_head, q_row, inside, WIDE)
    slope = tl.load(slopes_ptr + head) if ALIBI else 0.0
    ours = _documents(documents_ptr, batch, documents_batch, query, row < queries, DOCUMENTS)
    first, last = _keys_of_block(offset, keys, reach, CAUSAL, WINDOW, M, N)
    highest = tl.full([M], _LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    for start in range(first, last, N):
        key = start + tl.arange(0, N)
        theirs = _documents(documents_ptr, batch, documents_batch, key, key < keys, DOCUMENTS)
        if _touches(ours, theirs, DOCUMENTS):
            here = (key < keys)[:, None] & (column < size)[None, :]
            k = _load(k_ptr, batch, head // SHARED, key, column, k_batch, k_head, k_row, here, WIDE)
            scores = _scores(
                q, k, scale, query, key, ours, theirs, slope, offset + queries, keys, reach,
                CAUSAL, WINDOW, DOCUMENTS, ALIBI,
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = _weights(scores, higher)
            correction = tl.exp(highest - higher)
            v = _load(v_ptr, batch, head // SHARED, key, column, v_batch, v_head, v_row, here, WIDE)
            out = tl.dot(weights.to(v.dtype), v, out * correction[:, None], input_precision="ieee")
            total = total * correction + tl.sum(weights, 1)
            highest = higher
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out_ptr + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)
    logarithm = highest + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(logarithm_ptr + (batch * heads + head) * queries + row, logarithm, mask=row < queries)


@launchable
@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, d_out_ptr, d_q_ptr, logarithm_ptr, delta_ptr, documents_ptr, slopes_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row, d_q_batch, d_q_head, d_q_row,
    queries, keys, offset, reach, heads, size, scale, documents_batch,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, ALIBI: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    query, inside = offset + row, (row < queries)[:, None] & (column < size)[None, :]
    q = _load(q_ptr, batch, head, row, column, q_batch, q_head, q_row, inside, WIDE)
    d_out = _load(d_out_ptr, batch, head, row, column, d_out_batch, d_out_head, d_out_row, inside, WIDE)
    statistics = (batch * heads + head) * queries + row
    logarithm = tl.load(logarithm_ptr + statistics, mask=row < queries, other=0.0)
    delta = tl.load(delta_ptr + statistics, mask=row < queries, other=0.0)
    slope = tl.load(slopes_ptr + head) if ALIBI else 0.0
    ours = _documents(documents_ptr, batch, documents_batch, query, row < queries, DOCUMENTS)
    first, last = _keys_of_block(offset, keys, reach, CAUSAL, WINDOW, M, N)
    d_q = tl.zeros([M, D], tl.float32)
    for start in range(first, last, N):
        key = start + tl.arange(0, N)
        theirs = _documents(documents_ptr, batch, documents_batch, key, key < keys, DOCUMENTS)
        if _touches(ours, theirs, DOCUMENTS):
            here = (key < keys)[:, None] & (column < size)[None, :]
            k = _load(k_ptr, batch, head // SHARED, key, column, k_batch, k_head, k_row, here, WIDE)
            scores = _scores(
                q, k, scale, query, key, ours, theirs, slope, offset + queries, keys, reach,
                CAUSAL, WINDOW, DOCUMENTS, ALIBI,
            )  # fmt: skip
            weights = _weights(scores, logarithm)
            v = _load(v_ptr, batch, head // SHARED, key, column, v_batch, v_head, v_row, here, WIDE)
            d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
            d_scores = weights * (d_weights - delta[:, None])
            d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision="ieee")
    at = d_q_ptr + batch * d_q_batch + head * d_q_head + row[:, None] * d_q_row + column[None, :]
    tl.store(at, (d_q * scale).to(d_q_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, d_out_ptr, d_k_ptr, d_v_ptr, logarithm_ptr, delta_ptr, documents_ptr, slopes_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row, d_k_batch, d_k_head, d_k_row,
    queries, keys, offset, reach, groups, size, scale, documents_batch,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, ALIBI: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batch, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    key, column = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    here = (key < keys)[:, None] & (column < size)[None, :]
    k = _load(k_ptr, batch, group, key, column, k_batch, k_head, k_row, here, WIDE)
    v = _load(v_ptr, batch, group, key, column, v_batch, v_head, v_row, here, WIDE)
    theirs = _documents(documents_ptr, batch, documents_batch, key, key < keys, DOCUMENTS)
    first, last = 0, queries
    if CAUSAL:
        first = tl.maximum(tl.program_id(0) * N - offset, 0) // M * M
    if WINDOW:
        first = tl.maximum(first, tl.maximum(tl.program_id(0) * N - reach + 1 - offset, 0) // M * M)
        last = tl.minimum(last, (tl.program_id(0) + 1) * N + reach - 1 - offset)
    d_k, d_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for head in range(group * SHARED, (group + 1) * SHARED):
        slope = tl.load(slopes_ptr + head) if ALIBI else 0.0
        for start in range(first, last, M):
            row = start + tl.arange(0, M)
            query, inside = offset + row, (row < queries)[:, None] & (column < size)[None, :]
            ours = _documents(documents_ptr, batch, documents_batch, query, row < queries, DOCUMENTS)
            if _touches(ours, theirs, DOCUMENTS):
                q = _load(q_ptr, batch, head, row, column, q_batch, q_head, q_row, inside, WIDE)
                d_out = _load(d_out_ptr, batch, head, row, column, d_out_batch, d_out_head, d_out_row, inside, WIDE)
                statistics = (batch * groups * SHARED + head) * queries + row
                logarithm = tl.load(logarithm_ptr + statistics, mask=row < queries, other=0.0)
                delta = tl.load(delta_ptr + statistics, mask=row < queries, other=0.0)
                scores = _scores(
                    q, k, scale, query, key, ours, theirs, slope, offset + queries, keys, reach,
                    CAUSAL, WINDOW, DOCUMENTS, ALIBI,
                )  # fmt: skip
                weights = _weights(scores, logarithm)
                d_v = tl.dot(tl.trans(weights.to(v.dtype)), d_out, d_v, input_precision="ieee")
                d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
                d_scores = weights * (d_weights - delta[:, None])
                d_k = tl.dot(tl.trans(d_scores.to(q.dtype)), q, d_k, input_precision="ieee")
    at = batch * d_k_batch + group * d_k_head + key[:, None] * d_k_row + column[None, :]
    tl.store(d_k_ptr + at, (d_k * scale).to(d_k_ptr.dtype.element_ty), mask=here)
    tl.store(d_v_ptr + at, d_v.to(d_v_ptr.dtype.element_ty), mask=here)


def largest_head(dtype: torch.dtype) -> int:
    """Dimensions of a head beyond which registers spill."""
    return 64 if dtype == torch.float32 else 128


def forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, slopes: Tensor | None, *,
    causal: bool, reach: int | None, offset: int, in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T / sqrt(d) + ALiBi's term) v over what each query sees. Returns [b, n, q, d], laid out as [b, q, n,
    d], and the logarithms of the sums, [b, n, q] fp32.

    Args:
        query: [b, n, q, d], d at most `largest_head`; the last dimension contiguous.
        key: [b, g, k, d]; likewise.
        documents: [b, k], or [b, offset + q] if that is longer, int32 or int64, rows contiguous: of the positions
            from that of the first key on; a query sees its own document.
        slopes: [n] fp32.
        causal: no query sees a later key.
        reach: the distance from which a key is not seen.
        offset: position of the first query among the keys.
        in_fp32: whether the result is not rounded to query's type.
    """
    b, n, rows, d = query.shape
    out = query.new_empty((b, rows, n, d), dtype=torch.float32 if in_fp32 else query.dtype).transpose(1, 2)
    logarithm = query.new_empty((b, n, rows), dtype=torch.float32)
    if query.numel():
        options = _options(query, key, documents, slopes, causal=causal, reach=reach)
        blocks = _blocks(query, _forward)
        _forward[(blocks_of(rows, blocks["M"]), b * n)](
            query, key, value, out, logarithm, _or(documents, query), _or(slopes, query),
            *_strides(query, key, value, out),
            rows, key.shape[2], offset, reach or 0, n, d, d**-0.5, _row(documents), **options, **blocks,
        )  # fmt: skip
    return out, logarithm


def backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, logarithm: Tensor, delta: Tensor,
    documents: Tensor | None, slopes: Tensor | None, *, causal: bool, reach: int | None, offset: int,
    in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values, laid out as `forward` lays out its result.

    Args:
        query: as for `forward`, as all that is not named here.
        logarithm: [b, n, q] fp32 contiguous: what `forward` returned for these queries.
        delta: [b, n, q] fp32 contiguous: the sum of d_out times the result.
        in_fp32: whether gradients are not rounded to the type of what they are of.
    """
    b, n, rows, d = query.shape
    groups, keys = key.shape[1:3]
    kind = torch.float32 if in_fp32 else query.dtype
    d_query = query.new_empty((b, rows, n, d), dtype=kind).transpose(1, 2)
    d_key, d_value = (key.new_empty((b, keys, groups, d), dtype=kind).transpose(1, 2) for _ in range(2))
    if not query.numel():
        return d_query, d_key.zero_(), d_value.zero_()
    assert logarithm.is_contiguous() and delta.is_contiguous()
    options = _options(query, key, documents, slopes, causal=causal, reach=reach)
    masks = logarithm, delta, _or(documents, query), _or(slopes, query)
    sizes = rows, keys, offset, reach or 0
    blocks = _blocks(query, _backward_queries)
    _backward_queries[(blocks_of(rows, blocks["M"]), b * n)](
        query, key, value, d_out, d_query, *masks, *_strides(query, key, value, d_out, d_query),
        *sizes, n, d, d**-0.5, _row(documents), **options, **blocks,
    )  # fmt: skip
    blocks = _blocks(query, _backward_keys)
    _backward_keys[(blocks_of(keys, blocks["N"]), b * groups)](
        query, key, value, d_out, d_key, d_value, *masks, *_strides(query, key, value, d_out, d_key),
        *sizes, groups, d, d**-0.5, _row(documents), **options, **blocks,
    )  # fmt: skip
    return d_query, d_key, d_value


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not read needs some tensor."""
    return other if tensor is None else tensor


def _row(documents: Tensor | None) -> int:
    """Numbers from one sequence's documents to the next one's."""
    return 0 if documents is None else documents.stride(0)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors), "heads must lie side by side"
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _options(
    query: Tensor, key: Tensor, documents: Tensor | None, slopes: Tensor | None, *, causal: bool, reach: int | None
) -> dict[str, Any]:
    return {
        "SHARED": query.shape[1] // key.shape[1],
        "CAUSAL": causal,
        "WINDOW": reach is not None,
        "DOCUMENTS": documents is not None,
        "ALIBI": slopes is not None,
        "D": block_of(query.shape[-1]),
        "WIDE": interpreting(),
    }


def _blocks(query: Tensor, kernel: Any) -> dict[str, int]:
    """Queries and keys of a block: what the registers hold of a kernel's sums, for heads up to 64 and up to 128."""
    small, wide = query.shape[-1] <= 64, query.dtype == torch.float32
    m, n = {
        _forward: (128, 64),
        _backward_queries: (64, 64) if small else (64, 32),
        _backward_keys: (64, 32) if small else (32, 64),
    }[kernel]
    if wide:
        m = n = 32
    return {"M": m, "N": n, "num_warps": 8}
