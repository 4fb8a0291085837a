"""SwiGLU: silu(gate) * up, elementwise. Backward computes silu again instead of keeping it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable, rows_and_width

_BLOCK = 2048


@launchable
@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@launchable
@triton.jit
def _backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, width, gate_stride, up_stride, grad_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dgate_ptr + row * grad_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * grad_stride + column, (dy * silu).to(dup_ptr.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. `gate`: [..., f]; rows may lie apart, as those of one half of a wider tensor do, all equally
    far. `up`: [..., f]; likewise. Returns [..., f] contiguous."""
    rows, width = rows_and_width(gate)
    y = gate.new_empty(gate.shape)
    if y.numel():
        block = min(_BLOCK, block_of(width))
        _forward[(rows, blocks_of(width, block))](
            gate, up, y, width, _row_stride(gate), _row_stride(up), BLOCK=block, num_warps=4
        )
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, [..., f] contiguous; dy is contiguous too."""
    dgate, dup = torch.empty_like(dy), torch.empty_like(dy)
    _write_gradients(dy, gate, up, dgate, dup)
    return dgate, dup


def backward_of_halves(dy: Tensor, both: Tensor) -> Tensor:
    """Gradients of up and gate, the halves of [..., 2 f], in a tensor like it; dy is contiguous."""
    grad = torch.empty_like(both)
    (up, gate), (dup, dgate) = both.chunk(2, dim=-1), grad.chunk(2, dim=-1)
    _write_gradients(dy, gate, up, dgate, dup)
    return grad


def _write_gradients(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    rows, width = rows_and_width(gate)
    if dy.numel():
        block = min(_BLOCK, block_of(width))
        _backward[(rows, blocks_of(width, block))](
            dy,
            gate,
            up,
            dgate,
            dup,
            width,
            _row_stride(gate),
            _row_stride(up),
            _row_stride(dgate),
            BLOCK=block,
            num_warps=4,
        )


def _row_stride(x: Tensor) -> int:
    return x.stride(-2) if x.dim() > 1 else x.shape[-1]
