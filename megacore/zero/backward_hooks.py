"""Tensors that pass through unchanged, and let something happen when their gradients come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _WhenBackward(torch.autograd.Function):
    """The identity of several tensors; calls back once when their gradients pass."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


def when_backward(value: Any, call: Callable[[], None]) -> Any:
    """A tensor or a tuple of tensors, whose gradients, if there are any, let `call` happen as they pass."""
    if isinstance(value, Tensor):
        return _WhenBackward.apply(call, value)[0] if value.requires_grad else value
    learning = [tensor for tensor in value if tensor.requires_grad]
    needing = iter(_WhenBackward.apply(call, *learning) if learning else ())
    return tuple(next(needing) if tensor.requires_grad else tensor for tensor in value)


class OwnGradient(torch.autograd.Function):
    """The identity; hands its gradient to `take` instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.parameter, ctx.take = parameter, take
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.take(ctx.parameter, grad)
        return None, None
