"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), dimension i paired with dimension i + r/2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import (
    fit,
    is_fused,
    operator,
    require_contiguous,
    require_floats,
    require_same_device,
    require_shape,
    require_whole,
    runs_triton,
    uses_triton,
)


@operator("megacore::rotary")
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    if runs_triton(x):
        import megacore.kernels.rotary as kernel

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
    """Turn queries or keys by their positions' angles. Returns like x; dimensions from r on are copied. Raises
    ValueError where an argument's device, dtype, shape or strides do not fit.

    Args:
        x: [b, s, heads, d] contiguous; fp32, fp16 or bf16.
        cos: [s, r/2] contiguous, any of these dtypes, r <= d; cosines of position * frequency. Has no gradient.
        sin: [s, r/2] contiguous, of cos's dtype; likewise.
    """
    _check(x, cos, sin, name="x")
    return rotary_reference(x, cos, sin, backwards=False) if is_fused(x) else _rotary(x, cos, sin, False)


@operator("megacore::split_rotary")
def _split_rotary(packed: Tensor, cos: Tensor, sin: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(packed, "packed"):
        import megacore.kernels.rotary as kernel

        return kernel.split(packed, cos, sin, groups=groups)
    query, key, value = _split_reference(packed, cos, sin, groups)
    return query, key, value.clone()


@_split_rotary.register_fake
def _(packed: Tensor, cos: Tensor, sin: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    b, s, heads, d = packed.shape
    key = packed.new_empty((b, s, groups, d))
    return packed.new_empty((b, s, heads - 2 * groups, d)), key, torch.empty_like(key)


@operator("megacore::join_rotary")
def _join_rotary(dquery: Tensor, dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if runs_triton(dkey, "dkey"):
        import megacore.kernels.rotary as kernel

        return kernel.join(dquery, dkey, dvalue, cos, sin)
    turned = (rotary_reference(x, cos, sin, backwards=True) for x in (dquery, dkey))
    by_group = (x.unflatten(2, (dkey.shape[2], -1)) for x in (*turned, dvalue))
    return torch.cat(tuple(by_group), dim=3).flatten(2, 3)


@_join_rotary.register_fake
def _(dquery: Tensor, dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, s, groups, d = dkey.shape
    return dkey.new_empty((b, s, dquery.shape[2] + 2 * groups, d))


def _keep_split(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, _ = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_split(ctx: Any, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> tuple[Tensor, None, None, None]:
    return (
        _join_rotary(dquery.contiguous(), dkey.contiguous(), dvalue.contiguous(), *ctx.saved_tensors),
        None,
        None,
        None,
    )


_split_rotary.register_autograd(_differentiate_split, setup_context=_keep_split)


def _split_reference(packed: Tensor, cos: Tensor, sin: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    by_group = packed.unflatten(2, (groups, -1))  # [b, s, g, q + 2, d]
    parts = by_group.split([by_group.shape[3] - 2, 1, 1], dim=3)
    query, key, value = (part.flatten(2, 3).contiguous() for part in parts)
    return rotary(query, cos, sin), rotary(key, cos, sin), value


def split_rotary(packed: Tensor, cos: Tensor, sin: Tensor, *, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned as by `rotary`, and values, out of the projection that holds them by group. Returns
    queries [b, s, groups * q, d], keys and values [b, s, groups, d], contiguous. Raises ValueError where an argument's
    device, dtype, shape or strides do not fit.

    Args:
        packed: [b, s, groups * (q + 2), d] contiguous: of each group its q query heads, its key, its value.
        cos: [s, r/2], as for `rotary`.
        sin: [s, r/2]; likewise.
        groups: the number of key heads, which is that of value heads.
    """
    require_whole(groups=groups)
    _check(packed, cos, sin, name="packed")
    heads = packed.shape[2]
    if groups <= 0 or heads % groups or heads // groups < 3:
        raise ValueError(f"packed has {heads} heads: {groups} groups need the same number each, of 3 or more")
    if not uses_triton(packed):
        return _split_reference(packed, cos, sin, groups)
    query, key, value = _split_rotary(packed, cos, sin, groups)
    return query, key, value


def _check(x: Tensor, cos: Tensor, sin: Tensor, *, name: str) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be [b, s, heads, d]")
    if cos.dim() != 2:
        raise ValueError(f"cos has shape {tuple(cos.shape)}: it must be [s, r/2]")
    most = x.shape[3] // 2
    if not 0 < cos.shape[1] <= most:
        raise ValueError(f"cos has {cos.shape[1]} columns: it must have 1 to {most}, half of {name}'s last dimension")
    if fit(x) and fit(cos, alike=(sin,)) and cos.shape[0] == x.shape[1] and cos.device == x.device:
        return
    require_same_device(**{name: x}, cos=cos, sin=sin)
    require_floats(**{name: x})
    require_floats(cos=cos, sin=sin)
    require_shape((x.shape[1], cos.shape[1]), f"positions of {name} times r/2", cos=cos, sin=sin)
    require_contiguous(**{name: x}, cos=cos, sin=sin)
