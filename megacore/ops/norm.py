"""LayerNorm and RMSNorm over the last dimension, each also with the residual addition before it folded in. LayerNorm is
Ba et al. 2016 (arXiv 1607.06450), RMSNorm Zhang and Sennrich 2019 (arXiv 1910.07467). Means and squares are summed in
fp32, and the result is rounded once. In plain torch they are torch's functions, and so they are without a weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import (
    Node,
    fit,
    operator,
    require,
    require_alike,
    require_rows,
    require_shape,
    runs_triton,
)


@operator("megacore::norm_forward")
def _norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(x):
        import megacore.kernels.norm as kernel

        return kernel.forward(x, residual, weight, bias, epsilon=epsilon, rms=rms)
    return norm_forward_reference(x, residual, weight, bias, epsilon=epsilon, rms=rms)


@_norm_forward.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return (
        torch.empty_like(x),
        x.new_empty(0) if residual is None else torch.empty_like(x),
        x.new_empty(0 if rms else rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@operator("megacore::norm_backward")
def _norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool, has_bias: bool
) -> tuple[Tensor, Tensor]:
    if runs_triton(x):
        import megacore.kernels.norm as kernel

        return kernel.backward(dy, dsum, x, weight, mean=mean, rstd=rstd, rms=rms, has_bias=has_bias)
    return norm_backward_reference(dy, dsum, x, weight, mean=mean, rstd=rstd, rms=rms, has_bias=has_bias)


@_norm_backward.register_fake
def _(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool, has_bias: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(1 + has_bias, x.shape[-1], dtype=torch.float32)


def norm_forward_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, *, epsilon: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain torch; arguments and results as `megacore.kernels.norm.forward`."""
    summed = x.new_empty(0) if residual is None else x + residual
    wide = (x if residual is None else summed).float()
    mean = x.new_empty(0, dtype=torch.float32)
    if not rms:
        mean = wide.mean(-1)
        wide = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(wide.square().mean(-1) + epsilon)
    y = wide * rstd.unsqueeze(-1) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype), summed, mean.flatten(), rstd.flatten()


def norm_backward_reference(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, *, mean: Tensor, rstd: Tensor, rms: bool, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in plain torch; arguments and results as `megacore.kernels.norm.backward`."""
    of_row = (*x.shape[:-1], 1)
    wide = x.float() if rms else x.float() - mean.view(of_row)
    normal, grad = wide * rstd.view(of_row), dy.float()
    parameters = [term.view(-1, x.shape[-1]).sum(0) for term in (grad * normal, *([grad] if has_bias else []))]
    inner = grad * weight.float()
    dx = inner - normal * (inner * normal).mean(-1, keepdim=True)
    if not rms:
        dx -= inner.mean(-1, keepdim=True)
    dx *= rstd.view(of_row)
    return (dx if dsum is None else dx + dsum.float()).to(x.dtype), torch.stack(parameters)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, ctx.rms = inputs
    _, summed, mean, rstd = output
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(summed if ctx.has_residual else x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
    dx, dweight, dbias = _gradients(ctx, dy, dsum if ctx.has_residual else None)
    return dx, dx if ctx.has_residual else None, dweight, dbias, None, None


def _gradients(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of what was normalised, to which `dsum` is added, and of weight and bias."""
    x, weight, mean, rstd = ctx.saved_tensors
    dsum = None if dsum is None else dsum.contiguous()
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dx, parameters = _norm_backward(dy, dsum, x, weight, mean, rstd, ctx.rms, ctx.has_bias)
    dweight, *dbias = parameters.to(weight.dtype).unbind()
    return dx, dweight, dbias[0] if dbias else None


_norm_forward.register_autograd(_differentiate, setup_context=_keep, results=2)


class _WithInput(Node):
    """The normalised input, and the input as it is: its gradient is added in the pass of the norm's backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, rms: bool
    ) -> tuple[Tensor, Tensor]:
        y, _, mean, rstd = _norm_forward(x, None, weight, bias, epsilon, rms)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.rms, ctx.has_bias = rms, bias is not None
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        return *_gradients(ctx, dy, dx), None, None


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension. Returns [..., h] in x's dtype. Raises ValueError where an argument's device,
    dtype, shape or strides do not fit.

    Args:
        x: [..., h] contiguous; fp32, fp16 or bf16.
        weight: [h], of x's dtype; None: there is none.
        bias: [h], of x's dtype; None: there is none.
        epsilon: added to the variance.
    """
    return _normed(x, weight, bias, epsilon, rms=False)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x^2) + epsilon) * weight; otherwise like `layer_norm`."""
    return _normed(x, weight, None, epsilon, rms=True)


def _normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, *, rms: bool) -> Tensor:
    if (runs := fit(x, vectors=(weight, bias))) is None or not epsilon > 0:
        _refuse(x, epsilon, weight, bias)
    if weight is None or runs == "torch":
        shape = x.shape[-1:]
        return F.rms_norm(x, shape, weight, epsilon) if rms else F.layer_norm(x, shape, weight, bias, epsilon)
    y: Tensor = _norm_forward(x, None, weight, bias, epsilon, rms)[0]
    return y


def norm_and_sum(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float = 1e-5, *, rms: bool
) -> tuple[Tensor, Tensor]:
    """s = x + residual and the norm of s, reading and writing each once. Returns the normalised sum and the sum, both
    like x. Raises ValueError where an argument's device, dtype, shape or strides do not fit.

    Args:
        x: [..., h] contiguous; fp32, fp16 or bf16.
        residual: like x; None: s is x, for whoever reads it besides. Kernels then add up its gradients in one pass.
        weight: [h], of x's dtype; None: there is none.
        bias: [h], of x's dtype; None: there is none.
        epsilon: added to the variance, or to the mean square.
        rms: RMSNorm, and not LayerNorm.
    """
    if (runs := fit(x, vectors=(weight, bias), alike=(residual,))) is None or not epsilon > 0:
        _refuse(x, epsilon, weight, bias, residual)
    if weight is None or runs == "torch":
        x = x if residual is None else x + residual
        shape = x.shape[-1:]
        return F.rms_norm(x, shape, weight, epsilon) if rms else F.layer_norm(x, shape, weight, bias, epsilon), x
    if residual is not None:
        y, summed, *_ = _norm_forward(x, residual, weight, bias, epsilon, rms)
        return y, summed
    if torch.compiler.is_compiling():
        return _norm_forward(x, None, weight, bias, epsilon, rms)[0], x
    both: tuple[Tensor, Tensor] = _WithInput.apply(x, weight, bias, epsilon, rms)
    return both


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """s = x + residual and LayerNorm of s, as `norm_and_sum`."""
    return norm_and_sum(x, residual, weight, bias, epsilon, rms=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float = 1e-5) -> tuple[Tensor, Tensor]:
    """s = x + residual and RMSNorm of s, as `norm_and_sum`."""
    return norm_and_sum(x, residual, weight, None, epsilon, rms=True)


def _refuse(
    x: Tensor, epsilon: float, weight: Tensor | None, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    parameters = {name: one for name, one in (("weight", weight), ("bias", bias)) if one is not None}
    require_rows(x=x)
    require(epsilon > 0, f"epsilon is {epsilon}: it must be positive")
    require_shape(x.shape[-1:], "x's last dimension", **parameters)
    require_alike(x=x, **parameters)
    if residual is not None:
        require_shape(x.shape, "like x", residual=residual)
        require_alike(x=x, residual=residual)
