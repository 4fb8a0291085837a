"""Activations of the feed-forward layer: GELU, with the bias before it folded in or without, SwiGLU, GeGLU, squared
ReLU. GELU is the tanh form that GPT-2 uses (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2), SwiGLU that of
Shazeer 2020 (arXiv 2002.05202). Both keep only their inputs and compute the rest again in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import (
    fit,
    is_fused,
    operator,
    require,
    require_alike,
    require_floats,
    require_rows,
    require_same_device,
    require_shape,
    runs_triton,
)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _require_pair(gate: Tensor, up: Tensor) -> None:
    require_rows(gate=gate, up=up)
    require_same_device(gate=gate, up=up)
    require_floats(gate=gate, up=up)
    require_shape(gate.shape, "like gate", up=up)


@operator("megacore::gelu_forward")
def _gelu_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    if runs_triton(x):
        import megacore.kernels.gelu as kernel

        return kernel.forward(x, bias)
    return F.gelu(_biased(x, bias), approximate="tanh").to(x.dtype)


@_gelu_forward.register_fake
def _(x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@operator("megacore::gelu_backward")
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    if runs_triton(x):
        import megacore.kernels.gelu as kernel

        return kernel.backward(dy, x)
    return _gelu_gradient(dy, x)


@_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("megacore::bias_gelu_backward")
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    if runs_triton(x):
        import megacore.kernels.gelu as kernel

        return kernel.backward_biased(dy, x, bias)
    dx = _gelu_gradient(dy, _biased(x, bias)).to(x.dtype)
    return dx, dx.view(-1, dx.shape[-1]).sum(0)


@_bias_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(bias)


def _gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy.to(x.dtype), x, approximate="tanh")


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """The sum as the kernel has it, not rounded to 16 bits on the way."""
    return x if bias is None else x.float() + bias.float()


def _differentiate_gelu(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    if bias is None:
        return _gelu_backward(dy.contiguous(), x), None
    dx, dbias = _bias_gelu_backward(dy.contiguous(), x, bias)
    return dx, dbias


_gelu_forward.register_autograd(_differentiate_gelu, setup_context=_keep_inputs)


def gelu(x: Tensor, *, exact: bool = False) -> Tensor:
    """GELU, in its tanh form unless it is to be exact. Returns like x. Raises ValueError where x's dtype or strides do
    not fit.

    Args:
        x: [..., f] contiguous; fp32, fp16 or bf16.
        exact: with the error function, as in BERT; only in plain torch.
    """
    if (runs := fit(x)) is None:
        require_rows(x=x)
        require_alike(x=x)
    if exact or runs != "triton":
        return F.gelu(x, approximate="none" if exact else "tanh")
    y: Tensor = _gelu_forward(x, None)
    return y


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), the sum not rounded on the way. Returns like x. Raises ValueError where an argument's device,
    dtype, shape or strides do not fit.

    Args:
        x: [..., f] contiguous; fp32, fp16 or bf16.
        bias: [f], of x's dtype.
    """
    if not fit(x, vectors=(bias,)):
        require_rows(x=x)
        require_shape(x.shape[-1:], "x's last dimension", bias=bias)
        require_alike(x=x, bias=bias)
    y: Tensor = _gelu_forward(x, bias)
    return y


@operator("megacore::swiglu_forward")
def _swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    if runs_triton(gate, "gate"):
        import megacore.kernels.swiglu as kernel

        return kernel.forward(gate, up)
    return _swiglu_reference(gate, up)


def _swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@_swiglu_forward.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@operator("megacore::swiglu_backward")
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if runs_triton(gate, "gate"):
        import megacore.kernels.swiglu as kernel

        return kernel.backward(dy, gate, up)
    return _swiglu_gradients(dy, gate, up)


def _swiglu_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, grad = gate.float(), dy.float()
    sigmoid = wide.sigmoid()
    silu = wide * sigmoid
    dgate = grad * up.float() * (sigmoid + silu * (1.0 - sigmoid))
    return dgate.to(gate.dtype), (grad * silu).to(gate.dtype)


@_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), torch.empty_like(dy)


def _differentiate_swiglu(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _swiglu_backward(dy.contiguous(), *ctx.saved_tensors)


_swiglu_forward.register_autograd(_differentiate_swiglu, setup_context=_keep_inputs)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Returns [..., f] contiguous. Raises ValueError where an argument's device, dtype, shape or
    strides do not fit.

    Args:
        gate: [..., f]; fp32, fp16 or bf16. Rows may lie apart, as in one half of a wider tensor.
        up: like gate.
    """
    _require_pair(gate, up)
    if is_fused(gate):
        return _swiglu_reference(gate, up)
    return _swiglu_forward(_rows(gate, "gate"), _rows(up, "up")).view(gate.shape)


@operator("megacore::swiglu_of_halves")
def _halves_forward(both: Tensor) -> Tensor:
    up, gate = both.chunk(2, dim=-1)
    if runs_triton(both, "both"):
        import megacore.kernels.swiglu as kernel

        return kernel.forward(gate, up)
    return _swiglu_reference(gate, up)


@_halves_forward.register_fake
def _(both: Tensor) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


@operator("megacore::swiglu_of_halves_backward")
def _halves_backward(dy: Tensor, both: Tensor) -> Tensor:
    if runs_triton(both, "both"):
        import megacore.kernels.swiglu as kernel

        return kernel.backward_of_halves(dy, both)
    up, gate = both.chunk(2, dim=-1)
    dgate, dup = _swiglu_gradients(dy, gate, up)
    return torch.cat([dup, dgate], dim=-1)


@_halves_backward.register_fake
def _(dy: Tensor, both: Tensor) -> Tensor:
    return torch.empty_like(both)


def _differentiate_halves(ctx: Any, dy: Tensor) -> Tensor:
    return _halves_backward(dy.contiguous(), *ctx.saved_tensors)


_halves_forward.register_autograd(_differentiate_halves, setup_context=_keep_inputs)


def swiglu_of_halves(both: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of one tensor, whose gradient is one tensor too. Returns [..., f] contiguous.
    Raises ValueError where an argument's device, dtype, shape or strides do not fit.

    Args:
        both: [..., 2 f] contiguous, up and then gate; fp32, fp16 or bf16.
    """
    if not fit(both):
        require_rows(both=both)
        require_alike(both=both)
    if both.shape[-1] % 2:
        raise ValueError(f"both has a last dimension of {both.shape[-1]}: it must be even, for two halves")
    y: Tensor = _halves_forward(both)
    return y


def geglu(gate: Tensor, up: Tensor, *, exact: bool = False) -> Tensor:
    """gelu(gate) * up (Shazeer 2020), in plain torch. Returns like gate. Raises ValueError where an argument's device,
    dtype or shape does not fit.

    Args:
        gate: [..., f], any strides; fp32, fp16 or bf16.
        up: like gate.
        exact: as for `gelu`.
    """
    _require_pair(gate, up)
    return F.gelu(gate, approximate="none" if exact else "tanh") * up


_SLOPE, _LIMIT = 1.702, 7.0


class _ClampedSwiglu(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        g, u = gate.float().clamp(max=_LIMIT), up.float().clamp(-_LIMIT, _LIMIT)
        return ((u + 1.0) * g * torch.sigmoid(_SLOPE * g)).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        g, u, dy = gate.float().clamp(max=_LIMIT), up.float().clamp(-_LIMIT, _LIMIT), dy.float()
        share = torch.sigmoid(_SLOPE * g)
        dgate = dy * (u + 1.0) * share * (1.0 + _SLOPE * g * (1.0 - share)) * (gate <= _LIMIT)
        dup = dy * g * share * (up.abs() <= _LIMIT)
        return dgate.to(gate.dtype), dup.to(up.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) of a gate up to 7 and up between -7 and 7 (Agarwal et al. 2025, arXiv
    2508.10925, section 2.2), in plain torch. Returns like gate. Raises ValueError where an argument's device, dtype or
    shape does not fit.

    Args:
        gate: [..., f], any strides; fp32, fp16 or bf16.
        up: like gate.
    """
    _require_pair(gate, up)
    return _ClampedSwiglu.apply(gate, up)


class _SquaredReLU(torch.autograd.Function):
    """Keeps its input; torch's own operators would keep the output of ReLU beside it where it is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.relu(x).mul_(2.0).mul_(dy)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, arXiv 2109.08668, section 3), in plain torch. Returns like x. Raises ValueError where
    x's dtype does not fit.

    Args:
        x: any shape and strides; fp32, fp16 or bf16.
    """
    require_floats(x=x)
    return _SquaredReLU.apply(x)


def _rows(tensor: Tensor, name: str) -> Tensor:
    """[..., f] as [rows, f], without a copy."""
    refusal = (
        f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its rows must be contiguous and lie at "
        f"equal distances; call {name}.contiguous()"
    )
    require(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, refusal)
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise ValueError(refusal) from error
