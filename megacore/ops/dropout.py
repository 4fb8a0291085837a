"""residual + dropout(x) with a mask that is a function of a seed and the position, never stored. The random bits are
Philox 4x32-10 (Salmon et al. 2011) of the key `seed` and the counter (column / 4, row, 0, 0), a word for each of four
neighbouring columns. The plain form computes the same bits, so that both implementations, forward, backward and a
recomputation agree on every element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import (
    fit,
    operator,
    require,
    require_alike,
    require_rows,
    require_shape,
    require_whole,
    runs_triton,
)

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10: four words of 32 random bits for each key and counter. `key`: 64 bits. `counter`: four int64
    tensors of 32-bit values, of shapes that broadcast. Returns four int64 tensors of 32-bit values."""
    a, b, c, d = torch.broadcast_tensors(*counter)
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        (high_a, low_a), (high_c, low_c) = _multiply(a, _MULTIPLIERS[0]), _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ low, low_c, high_a ^ d ^ high, low_a
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return a, b, c, d


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of the product of 32-bit numbers, which does not fit a signed 64-bit one: in two halves."""
    upper, lower = x * (constant >> 16), x * (constant & 0xFFFF)
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & _WORD


def kept(seed: int, threshold: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Which elements of [rows, width] stay."""
    rows, width = shape
    zero = torch.zeros((), dtype=torch.int64, device=device)
    column = torch.arange(-(-width // 4), device=device)
    words = philox(seed, (column, torch.arange(rows, device=device)[:, None], zero, zero))
    return torch.stack(words, dim=-1).flatten(1)[:, :width] >= threshold


@operator("megacore::dropout_add")
def _dropout_add(x: Tensor, residual: Tensor, seed: int, threshold: int, scale: float) -> Tensor:
    if runs_triton(x):
        import megacore.kernels.dropout as kernel

        return kernel.forward(x, residual, seed=seed, threshold=threshold, scale=scale)
    return (torch.where(_kept_of(x, seed, threshold), x.float() * scale, 0.0) + residual.float()).to(x.dtype)


@_dropout_add.register_fake
def _(x: Tensor, residual: Tensor, seed: int, threshold: int, scale: float) -> Tensor:
    return torch.empty_like(x)


@operator("megacore::dropout_backward")
def _dropout_backward(dy: Tensor, seed: int, threshold: int, scale: float) -> Tensor:
    if runs_triton(dy, "dy"):
        import megacore.kernels.dropout as kernel

        return kernel.backward(dy, seed=seed, threshold=threshold, scale=scale)
    return torch.where(_kept_of(dy, seed, threshold), dy.float() * scale, 0.0).to(dy.dtype)


@_dropout_backward.register_fake
def _(dy: Tensor, seed: int, threshold: int, scale: float) -> Tensor:
    return torch.empty_like(dy)


def _kept_of(x: Tensor, seed: int, threshold: int) -> Tensor:
    return kept(seed, threshold, (math.prod(x.shape[:-1]), x.shape[-1]), x.device).view(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, *ctx.mask = inputs


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    return _dropout_backward(dy.contiguous(), *ctx.mask), dy, None, None, None


_dropout_add.register_autograd(_differentiate, setup_context=_keep)


def dropout_add(x: Tensor, residual: Tensor, *, probability: float, seed: int) -> Tensor:
    """residual + dropout(x), what is kept divided by 1 - probability (Srivastava et al. 2014). Returns like x. Raises
    ValueError where an argument's device, dtype, shape, strides or range do not fit.

    Args:
        x: [..., h] contiguous; fp32, fp16 or bf16.
        residual: like x.
        probability: share of elements dropped, in [0, 1).
        seed: 0 to 2^63 - 1; the mask is a function of it, and of row and column.
    """
    _check_mask(probability, seed)
    if not fit(x, alike=(residual,)):
        require_rows(x=x, residual=residual)
        require_shape(x.shape, "like x", residual=residual)
        require_alike(x=x, residual=residual)
    result: Tensor = _dropout_add(x, residual, seed, _threshold(probability), 1.0 / (1.0 - probability))
    return result


def dropout_mask(shape: Sequence[int], *, probability: float, seed: int, device: torch.device) -> Tensor:
    """What `dropout_add` keeps, as a bool tensor. Raises ValueError where an argument's shape or range does not fit.

    Args:
        shape: [..., h].
        probability: share of elements dropped, in [0, 1).
        seed: 0 to 2^63 - 1.
        device: where the mask is made.
    """
    require(len(shape) > 0 and shape[-1] > 0, f"shape is {tuple(shape)}: its last dimension must hold something")
    _check_mask(probability, seed)
    return kept(seed, _threshold(probability), (math.prod(shape[:-1]), shape[-1]), device).view(*shape)


def _check_mask(probability: float, seed: int) -> None:
    if not 0 <= probability < 1:
        raise ValueError(f"probability is {probability}: it must be in [0, 1)")
    require_whole(seed=seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}: it must be in [0, 2^63)")


def _threshold(probability: float) -> int:
    return min(round(probability * 2**32), _WORD)
