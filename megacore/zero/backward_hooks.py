"""Tensors that pass through unchanged, and let something happen when their gradients come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class BackwardHook(Protocol):
    """What happens when gradients pass."""

    def gradients_pass(self) -> None:
        """Backward has come to the tensors: it is past what follows them in the forward."""


class _WhenBackward(torch.autograd.Function):
    """The identity of several tensors; tells a hook once when their gradients pass."""

    @staticmethod
    def forward(ctx: Any, hook: BackwardHook, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hook.gradients_pass()
        return None, *grads


def when_backward(value: Any, hook: BackwardHook) -> Any:
    """A tensor or a tuple of tensors, whose gradients, if there are any, tell the hook as they pass."""
    if isinstance(value, Tensor):
        return _WhenBackward.apply(hook, value)[0] if value.requires_grad else value
    learning = [tensor for tensor in value if tensor.requires_grad]
    needing = iter(_WhenBackward.apply(hook, *learning) if learning else ())
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
