"""Checks of operators' arguments: every refusal names the argument, what it is, and what is expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def require_floats(**tensors: Tensor) -> None:
    """fp32, fp16 or bf16, all alike.

    Raises:
        ValueError: one is of another type than these, or than the first.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {_short(tensor.dtype)}: it must be float32, float16 or bfloat16")
        if tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {_short(tensor.dtype)}: it must be {_short(first.dtype)}, like {first_name}")


def require_same_device(**tensors: Tensor) -> None:
    """All on the first one's device.

    Raises:
        ValueError: one is elsewhere.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}: it must be on {first.device}, like {first_name}")


def require_shape(shape: Sequence[int], why: str, **tensors: Tensor) -> None:
    """All of one shape.

    Raises:
        ValueError: one has another shape.
    """
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be {tuple(shape)}, {why}")


def require_contiguous(**tensors: Tensor) -> None:
    """Rows one after the other, without gaps.

    Raises:
        ValueError: one has other strides.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: it must be contiguous; "
                f"call {name}.contiguous()"
            )


def require_integers(**tensors: Tensor) -> None:
    """int32 or int64.

    Raises:
        ValueError: one is of another type.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {_short(tensor.dtype)}: it must be int64 or int32")


def require_rows(**tensors: Tensor) -> None:
    """At least one dimension, of which the last holds something.

    Raises:
        ValueError: one has none, or an empty last one.
    """
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or tensor.shape[-1] == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: its last dimension must hold something")


def require_whole(**numbers: int | None) -> None:
    """Whole numbers, or None.

    Raises:
        ValueError: one is something else.
    """
    for name, number in numbers.items():
        if number is not None and not isinstance(number, (int, torch.SymInt)):
            raise ValueError(f"{name} is {number}: it must be a whole number")


def require(condition: bool, message: str) -> None:
    """A condition in words.

    Raises:
        ValueError: it does not hold.
    """
    if not condition:
        raise ValueError(message)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
