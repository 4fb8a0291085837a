"""Softmax of attention scores, with the scale and the masks folded in.

What a mask hides has weight exactly 0, and a query that sees nothing has weight 0 everywhere, where a plain softmax of
-inf gives NaN and one of -10000 spreads the weight evenly over what must not be seen.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import (
    operator,
    require,
    require_alike,
    require_whole,
    runs_triton,
)


@operator("megacore::softmax_forward")
def _softmax_forward(x: Tensor, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    if runs_triton(x):
        import megacore.kernels.softmax as kernel

        return kernel.forward(x, scale=scale, causal=causal, offset=offset, window=window)
    return softmax_reference(x, scale=scale, causal=causal, offset=offset, window=window)


@_softmax_forward.register_fake
def _(x: Tensor, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    return torch.empty_like(x)


@operator("megacore::softmax_backward")
def _softmax_backward(dy: Tensor, y: Tensor, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    if runs_triton(y, "y"):
        import megacore.kernels.softmax as kernel

        return kernel.backward(dy, y, scale=scale, causal=causal, offset=offset, window=window)
    wide, grad = y.float(), dy.float()
    return (wide * (grad - (wide * grad).sum(-1, keepdim=True)) * scale).to(y.dtype)


@_softmax_backward.register_fake
def _(dy: Tensor, y: Tensor, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    return torch.empty_like(y)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.options = inputs
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
    (y,) = ctx.saved_tensors
    return _softmax_backward(dy.contiguous(), y, *ctx.options), None, None, None, None


_softmax_forward.register_autograd(_differentiate, setup_context=_keep)


def hidden_keys(shape: tuple[int, ...], *, causal: bool, offset: int, window: int | None, device: Any) -> Tensor | None:
    """Where a key is not seen by a query, as a mask that broadcasts to [b, heads, sq, sk]; None: all are seen."""
    query = torch.arange(shape[-2], device=device)[:, None] + offset
    key = torch.arange(shape[-1], device=device)
    hidden: Tensor | None = None
    if causal:
        hidden = key > query
    if window is not None:
        before = key <= query - window
        hidden = before if hidden is None else hidden | before
    return hidden


def softmax_reference(x: Tensor, *, scale: float, causal: bool, offset: int, window: int | None) -> Tensor:
    """What the kernel computes, in plain torch; arguments and result as `megacore.kernels.softmax.forward`."""
    hidden = hidden_keys(tuple(x.shape), causal=causal, offset=offset, window=window, device=x.device)
    wide = x.float() * scale
    if hidden is not None:
        wide.masked_fill_(hidden, -math.inf)
    y = torch.softmax(wide, -1)
    if x.numel():  # torch's softmax of nothing but -inf is NaN
        y.masked_fill_(wide.amax(-1, keepdim=True) == -math.inf, 0.0)
    return (y if hidden is None else y.masked_fill_(hidden, 0.0)).to(x.dtype)


def fused_softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
) -> Tensor:
    """softmax(scale * x) over the keys that each query sees, summed in fp32. Returns like x. Weights of what is not
    seen are exactly 0, also those of a query that sees nothing, or nothing but scores of -inf. Raises ValueError where
    an argument's device, dtype, shape or strides do not fit.

    Args:
        x: [b, heads, sq, sk] contiguous scores; fp32, fp16 or bf16; any sizes.
        scale: multiplies the scores; positive.
        causal: query i sees keys up to i + offset.
        offset: position of the first query among the keys. None: sk - sq, the queries being the last of the
            sequence.
        window: query i sees only keys after i + offset - window (with causal: the last `window` keys).
    """
    require(x.dim() == 4, f"x has shape {tuple(x.shape)}: it must be [b, heads, sq, sk]")
    require_alike(x=x)
    require(0 < scale < math.inf, f"scale is {scale}: it must be positive and finite")
    require_whole(window=window, offset=offset)
    require(window is None or window > 0, f"window is {window}: it must be positive, or None for no limit")
    offset = x.shape[3] - x.shape[2] if offset is None else offset
    return _softmax_forward(x, scale, causal, offset, window)
