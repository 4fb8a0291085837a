"""The states between chunks of a linear recurrence, S_{n+1} = M_n S_n + N_n, in one launch instead of some per chunk. A
program keeps some columns of one head's state in registers, and takes it from chunk to chunk. Backward is the same from
the last chunk to the first, with M transposed. Sums are in fp32. Shape legend: n heads of all samples, c chunks, k rows
and v columns of a state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable

_COLUMNS = 32  # of a state: few, so that there are many programs
_INNER = 16  # columns of M at once: a product of all would need more registers than there are


@launchable
@triton.jit
def _states(
    passes_ptr, makes_ptr, state_ptr, states_ptr, chunks, rows, columns, makes_head, state_head,
    K: tl.constexpr, V: tl.constexpr, INNER: tl.constexpr, IS_MATRIX: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, K)
    column = tl.program_id(1) * V + tl.arange(0, V)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    size, size_of_matrix = rows * columns, rows * rows
    row_stride, inner_stride = (1, rows) if BACKWARDS else (rows, 1)
    states_ptr += head * (chunks + 1) * size
    state = tl.load(state_ptr + head * state_head + at, mask=inside, other=0.0)
    for step in range(chunks):
        number = chunks - 1 - step if BACKWARDS else step
        now = number + 1 if BACKWARDS else number
        tl.store(states_ptr + now * size + at, state, mask=inside)
        made = tl.load(makes_ptr + head * makes_head + number * size + at, mask=inside, other=0.0)
        if IS_MATRIX:
            tl.debug_barrier()  # other threads read what this one has stored
            matrix = passes_ptr + (head * chunks + number) * size_of_matrix
            for start in range(0, rows, INNER):
                inner = start + tl.arange(0, INNER)
                across = (row < rows)[:, None] & (inner < rows)[None, :]
                passes_at = matrix + row[:, None] * row_stride + inner[None, :] * inner_stride
                passes = tl.load(passes_at, mask=across, other=0.0)
                below = (inner < rows)[:, None] & (column < columns)[None, :]
                part_at = states_ptr + now * size + inner[:, None] * columns + column[None, :]
                made = tl.dot(passes, tl.load(part_at, mask=below, other=0.0), made, input_precision="ieee")
            state = made
        else:
            passes = tl.load(passes_ptr + (head * chunks + number) * rows + row, mask=row < rows, other=0.0)
            state = passes[:, None] * state + made
    tl.store(states_ptr + (0 if BACKWARDS else chunks) * size + at, state, mask=inside)


def states(passes: Tensor, makes: Tensor, state: Tensor, *, backwards: bool = False) -> Tensor:
    """The states before and after each chunk, [n, c + 1, k, v], contiguous; all in fp32.

    Args:
        passes: M, [n, c, k, k], or its diagonal, [n, c, k, 1], contiguous.
        makes: N, [n, c, k, v]; those of a head contiguous.
        state: before the first chunk, or `backwards` after the last one, [n, k, v]; that of a head contiguous.
        backwards: from the last chunk to the first, with M transposed.
    """
    heads, chunks, rows, columns = makes.shape
    made = makes.new_empty(heads, chunks + 1, rows, columns)
    block = min(_COLUMNS, block_of(columns))
    _states[(heads, blocks_of(columns, block))](
        passes, makes, state, made, chunks, rows, columns, makes.stride(0), state.stride(0),
        K=block_of(rows), V=block, INNER=_INNER, IS_MATRIX=passes.shape[-1] > 1, BACKWARDS=backwards, num_warps=8,
    )  # fmt: skip
    return made
