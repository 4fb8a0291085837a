"""Autograd identities that run a hook when the gradient of a tensor is computed."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class BackwardHook(Protocol):
    """Runs in backward."""

    def on_backward(self) -> None:
        """Backward has reached the tensors: the gradients of all that follows them in the forward are computed."""


class _WhenBackward(torch.autograd.Function):
    """The identity of several tensors; calls a hook once when backward reaches them."""

    @staticmethod
    def forward(ctx: Any, hook: BackwardHook, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hook.on_backward()
        return None, *grads


def when_backward(value: Any, hook: BackwardHook) -> Any:
    """The tensor or tuple of tensors `value`; backward calls the hook when it reaches them, if they need gradients."""
    if isinstance(value, Tensor):
        return _WhenBackward.apply(hook, value)[0] if value.requires_grad else value
    learning = [tensor for tensor in value if tensor.requires_grad]
    needing = iter(_WhenBackward.apply(hook, *learning) if learning else ())
    return tuple(next(needing) if tensor.requires_grad else tensor for tensor in value)
