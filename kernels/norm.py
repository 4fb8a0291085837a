"""LayerNorm and RMSNorm over rows, with the residual addition folded in, and their backward.

Forward: a program a row; rows beyond `ONE_BLOCK` are read three times, from cache after the first.

Backward, from narrow rows to wide ones:

- `_backward`, up to `PERSISTENT`: a few programs a processor walk over the rows, keep their share of dweight and dbias
  in registers, and copy the next row to shared memory meanwhile.
- `_backward_chunked`, up to `CHUNKED`: the same, except that a row does not fit beside the shares. A program reads it
  twice, in chunks; the second time from cache.
- Beyond, where the shares would spill, `_backward_wide` computes dx by rows and `_backward_columns` dweight and dbias
  by columns. Both read x and dy from memory: 5 numbers move per element instead of 3.

The shares are added in a fixed order, without atomics: the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import (
    aligned,
    block_of,
    blocks_of,
    launchable,
    processors,
    rows_and_width,
    stages_of,
    warps_of,
)

# Columns that the registers of a program hold: of rows that begin at multiples of 16 elements, and of others, whose
# elements are addressed one by one. Beyond, ptxas spills (tools/kernel_report.py).
ONE_BLOCK = {True: 16384, False: 8192}
PERSISTENT = {True: 8192, False: 2048}
# Aligned columns of 16 bits that `_backward_chunked` handles: of RMSNorm, and of LayerNorm, which also sums dbias.
CHUNKED = {True: 16384, False: 12288}
_CHUNK = 8192
_BACKWARD_CHUNK = 4096  # 8 columns a thread: one access of 128 bits
_TILE_ROWS, _TILE_COLUMNS = 8, 256


@launchable
@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, width, epsilon,
    RMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if not RMS:
        mean = tl.sum(x, 0) / width
        tl.store(mean_ptr + row, mean)
        x -= mean
    squares = tl.where(inside, x * x, 0.0)  # masked here and not before: two registers fewer
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + epsilon)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit
def _forward_wide(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, width, epsilon,
    RMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL or not RMS:
        for start in range(0, width, BLOCK):
            inside = start + lanes < width
            at = row * width + start + lanes
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
                rounded = x.to(sum_ptr.dtype.element_ty)
                tl.store(sum_ptr + at, rounded, mask=inside)
                x = rounded.to(tl.float32)
            total += x
    mean = 0.0
    if not RMS:
        mean = tl.sum(total, 0) / width
        tl.store(mean_ptr + row, mean)
    read_ptr = x_ptr
    if HAS_RESIDUAL:
        tl.debug_barrier()  # a thread may now read what another has stored
        read_ptr = sum_ptr
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        x = tl.load(read_ptr + row * width + start + lanes, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - mean, 0.0)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + epsilon)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        at = row * width + start + lanes
        x = tl.load(read_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * tl.load(weight_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _means(products, sums, width, RMS: tl.constexpr):
    """Both sums over a row, divided by its width, in one reduction; RMSNorm needs the first alone."""
    if RMS:
        return tl.sum(products, 0) / width, 0.0
    product, total = tl.reduce((products, sums), 0, _add_pairs)
    return product / width, total / width


@launchable
@triton.jit
def _backward(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, rows, width,
    RMS: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    at = program.to(tl.int64) * width + columns
    # The next rows are on their way to shared memory while this one is computed.
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if not RMS:
            x -= tl.load(mean_ptr + row)  # beyond the width too: dy is 0 there
        x *= rstd
        dweight += dy * x
        if HAS_BIAS:
            dbias += dy
        dy *= weight
        product, average = _means(dy * x, dy, width, RMS)
        dx = (dy - x * product - average) * rstd
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        at += tl.num_programs(0).to(tl.int64) * width
    tl.store(dweight_ptr + program * width + columns, dweight, mask=inside)
    if HAS_BIAS:
        tl.store(dbias_ptr + program * width + columns, dbias, mask=inside)


@triton.jit
def _zeros(PARTS: tl.constexpr, BLOCK: tl.constexpr):
    parts = ()
    for _ in tl.static_range(PARTS):
        parts += (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
    return parts


@launchable
@triton.jit
def _backward_chunked(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, rows, width,
    RMS: tl.constexpr, HAS_DSUM: tl.constexpr, HAS_BIAS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    dweight = _zeros(CHUNKS, BLOCK)
    dbias = _zeros(CHUNKS, BLOCK)
    first = program.to(tl.int64) * width
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if not RMS:
            mean = tl.load(mean_ptr + row)
        products = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK + lanes
            inside = column < width
            x = tl.load(x_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
            dy *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            products += dy * ((x - mean) * rstd)
            sums += dy
        product, average = _means(products, sums, width, RMS)
        new_dweight = ()
        new_dbias = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK + lanes
            inside = column < width
            x = (tl.load(x_ptr + first + column, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
            dy = tl.load(dy_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
            new_dweight += (dweight[chunk] + dy * x,)  # type: ignore[assignment]
            new_dbias += (dbias[chunk] + dy if HAS_BIAS else dbias[chunk],)  # type: ignore[assignment]
            dy *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            dx = (dy - x * product - average) * rstd
            if HAS_DSUM:
                dx += tl.load(dsum_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + first + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight = new_dweight
        dbias = new_dbias
        first += tl.num_programs(0).to(tl.int64) * width
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK + lanes
        tl.store(dweight_ptr + program * width + column, dweight[chunk], mask=column < width)
        if HAS_BIAS:
            tl.store(dbias_ptr + program * width + column, dbias[chunk], mask=column < width)


@launchable
@triton.jit
def _backward_wide(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, width,
    RMS: tl.constexpr, HAS_DSUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if not RMS:
        mean = tl.load(mean_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        at = row * width + start + lanes
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy *= tl.load(weight_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        products += dy * ((x - mean) * rstd)
        if not RMS:
            sums += dy
    product = tl.sum(products, 0) / width
    average = tl.sum(sums, 0) / width
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        at = row * width + start + lanes
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy *= tl.load(weight_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        dx = (dy - ((x - mean) * rstd) * product - average) * rstd
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit
def _backward_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, rows, width, rows_per_share,
    RMS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.program_id(1)
    first = share * rows_per_share
    last = tl.minimum(first + rows_per_share, rows)
    inside_row = columns < width
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + columns[None, :]
        inside = (row < last)[:, None] & inside_row[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            x -= tl.load(mean_ptr + row, mask=row < last, other=0.0)[:, None]
        dweight += dy * x * tl.load(rstd_ptr + row, mask=row < last, other=0.0)[:, None]
        if HAS_BIAS:
            dbias += dy
    tl.store(dweight_ptr + share * width + columns, tl.sum(dweight, 0), mask=inside_row)
    if HAS_BIAS:
        tl.store(dbias_ptr + share * width + columns, tl.sum(dbias, 0), mask=inside_row)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, *, epsilon: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise each row. Returns y [..., h]; x + residual as it was normalised (empty without residual); mean [rows]
    fp32 (empty for RMSNorm); reciprocal deviation [rows] fp32.

    Args:
        x: [..., h] contiguous, of any number of rows.
        residual: [..., h], added to x first; None for none.
        weight: [h].
        bias: [h] or None.
        epsilon: added to the variance or mean square.
    """
    rows, width = rows_and_width(x)
    y = torch.empty_like(x)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x)
    mean = x.new_empty(0 if rms else rows, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:
        wide = width > ONE_BLOCK[aligned(width)]
        block = _CHUNK if wide else block_of(width)
        (_forward_wide if wide else _forward)[(rows,)](
            x, residual, weight, bias, y, summed, mean, rstd, width, epsilon,
            RMS=rms, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None,
            BLOCK=block, num_warps=warps_of(block, 512, 16 if wide else 32),
        )  # fmt: skip
    return y, summed, mean, rstd


def backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, *, mean: Tensor, rstd: Tensor, rms: bool, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `forward`. Returns dx [..., h]; dweight and, where there is a bias, dbias, [1 or 2, h] fp32.

    Args:
        dy: [..., h] contiguous.
        dsum: [..., h], the gradient that reaches x + residual by another way; None for none.
        x: [..., h], what was normalised.
        weight: [h].
        mean: [rows]; not read for RMSNorm.
        rstd: [rows].
    """
    rows, width = rows_and_width(x)
    dx = torch.empty_like(x)
    has_dsum = dsum is not None
    flags = {"RMS": rms, "HAS_DSUM": has_dsum}
    persistent = width <= PERSISTENT[aligned(width)]
    chunked = not persistent and aligned(width) and x.element_size() == 2 and width <= CHUNKED[rms]
    if persistent or chunked:
        block = block_of(width)
        programs = _programs_each(block)
        shares = max(1, min(rows, processors(x.device) * programs))
    else:
        shares = max(1, min(-(-rows // 64), 4 * processors(x.device) * _TILE_COLUMNS // width + 1))
    parameters = x.new_empty((1 + has_bias, shares, width), dtype=torch.float32)
    if not rows:  # every program writes its share, and there is none
        parameters.zero_()
    dweight, dbias = parameters.unbind() if has_bias else (parameters, parameters)
    if rows and persistent:
        # Where a processor has one program, one row on its way does not keep a fast memory busy.
        on_hopper = 3 if programs == 1 else 2
        _backward[(shares,)](
            dy, dsum, x, weight, mean, rstd, dx, dweight, dbias, rows, width,
            **flags, HAS_BIAS=has_bias, BLOCK=block, num_warps=warps_of(block, 256, 32),
            STAGES=stages_of((2 + has_dsum) * x.element_size() * block, x.get_device(), 2, on_hopper),
        )  # fmt: skip
    elif rows and chunked:
        # Two stages spill in LayerNorm. Of a row, x and dy of both passes and the weight have a place each.
        chunks = blocks_of(width, _BACKWARD_CHUNK)
        _backward_chunked[(shares,)](
            dy, dsum, x, weight, mean, rstd, dx, dweight, dbias, rows, width,
            **flags, HAS_BIAS=has_bias, CHUNKS=chunks, BLOCK=_BACKWARD_CHUNK, num_warps=16,
            STAGES=stages_of((5 + has_dsum) * x.element_size() * chunks * _BACKWARD_CHUNK, x.get_device(), 1 + rms),
        )  # fmt: skip
    elif rows:
        _backward_wide[(rows,)](
            dy, dsum, x, weight, mean, rstd, dx, width, **flags, BLOCK=_CHUNK, num_warps=16
        )  # fmt: skip
        _backward_columns[(blocks_of(width, _TILE_COLUMNS), shares)](
            dy, x, mean, rstd, dweight, dbias, rows, width, -(-rows // shares),
            RMS=rms, HAS_BIAS=has_bias, ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS, num_warps=4,
        )  # fmt: skip
    return dx, parameters.sum(1)


def _programs_each(block: int) -> int:
    """Persistent programs that the registers of one processor hold at once."""
    return max(1, min(8, 8192 // block))
