"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), dimension i paired with dimension i + r/2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import (
    require,
    require_contiguous,
    require_floats,
    require_same_device,
    require_shape,
    runs_triton,
)


@torch.library.custom_op("megacore::rotary", mutates_args=())
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    if runs_triton(x=x):
        from megacore.kernels import rotary as kernel

        return kernel.rotate(x, cos, sin, backwards=backwards)
    return rotary_reference(x, cos, sin, backwards=backwards)


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    return torch.empty_like(x)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    """What the kernel computes, in plain torch; arguments and result as `megacore.kernels.rotary.rotate`."""
    half = cos.shape[1]
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :] * (-1.0 if backwards else 1.0)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.backwards = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    return _rotary(dy.contiguous(), *ctx.saved_tensors, not ctx.backwards), None, None, None


_rotary.register_autograd(_differentiate, setup_context=_keep)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys by their positions' angles.

    Args:
        x: [b, s, heads, d] contiguous; fp32, fp16 or bf16.
        cos: [s, r/2] contiguous, any of these dtypes, r <= d; cosines of position * frequency. Has no gradient.
        sin: [s, r/2] contiguous, of cos's dtype; likewise.

    Returns:
        Like x; dimensions from r on are copied.

    Raises:
        ValueError: an argument's device, dtype, shape or strides do not fit.
    """
    require(x.dim() == 4, f"x has shape {tuple(x.shape)}: it must be [b, s, heads, d]")
    require(cos.dim() == 2, f"cos has shape {tuple(cos.shape)}: it must be [s, r/2]")
    most = x.shape[3] // 2
    require(
        0 < cos.shape[1] <= most,
        f"cos has {cos.shape[1]} columns: it must have 1 to {most}, half of x's last dimension",
    )
    require_same_device(x=x, cos=cos, sin=sin)
    require_floats(x=x)
    require_floats(cos=cos, sin=sin)
    require_shape((x.shape[1], cos.shape[1]), "positions of x times r/2", cos=cos, sin=sin)
    require_contiguous(x=x, cos=cos, sin=sin)
    return _rotary(x, cos, sin, False)
