"""Which implementation of the operators runs: decided once at launch, the same for every operator.

`auto` is Triton for tensors on a GPU where Triton is installed, and plain torch elsewhere and in what torch.compile
compiles, which makes fewer kernels of it. Tests choose for a while
with `kernels_chosen`. Triton is imported by the first operator that needs it and never otherwise: it is optional, and
takes a second to load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from megacore.kernels.availability import triton_version

Choice = Literal["auto", "triton", "torch"]


class _Decision:
    """The choice in force. Like torch's own backend switches it belongs to the process, not to a model: an operator
    that torch.compile or autograd calls is handed tensors alone."""

    choice: Choice = "auto"
    triton: str | None = triton_version()


def why_not(choice: Choice, device: torch.device) -> str | None:
    """Why the choice cannot run on a device, in a sentence; None if it can.

    Args:
        choice: what --kernels says.
        device: where the model computes.
    """
    if choice != "triton":
        return None
    if _Decision.triton is None:
        return "needs Triton, which is not installed: pip install triton, or use --kernels auto or torch"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "runs on a GPU, and this run computes on the CPU: use --kernels auto or torch, or, to try the kernels in "
            "Triton's slow interpreter, set TRITON_INTERPRET=1"
        )
    return None


def choose_kernels(choice: Choice) -> None:
    """Decide for the rest of the process.

    Raises:
        ValueError: there is no such choice.
    """
    if choice not in get_args(Choice):
        raise ValueError(f"choice is {choice!r}: it must be one of {', '.join(get_args(Choice))}")
    _Decision.choice = choice


@contextmanager
def kernels_chosen(choice: Choice) -> Iterator[None]:
    """Decide for the length of a block."""
    before = _Decision.choice
    choose_kernels(choice)
    try:
        yield
    finally:
        _Decision.choice = before


def uses_triton(x: Tensor) -> bool:
    """Whether operators on this tensor run as Triton kernels."""
    if _Decision.choice == "auto":
        return x.is_cuda and _Decision.triton is not None and not torch.compiler.is_compiling()
    return _Decision.choice == "triton"


def is_fused(x: Tensor) -> bool:
    """Whether torch.compile is to see what the operator does, and fuse it with its neighbours."""
    return torch.compiler.is_compiling() and not uses_triton(x)


def runs_triton(**tensor: Tensor) -> bool:
    """`uses_triton` of an implementation about to run, which needs numbers that a kernel can read.

    Args:
        tensor: one, by the name that callers know it by.

    Raises:
        ValueError: Triton was chosen, and cannot run where the tensor is.
    """
    ((name, x),) = tensor.items()
    if (reason := why_not(_Decision.choice, x.device)) is not None:
        raise ValueError(f"{name} is on {x.device}, and the chosen implementation, triton, {reason}")
    return uses_triton(x)


def described(device: torch.device) -> str:
    """The implementation that operators on a device run, for the launch summary."""
    return f"triton {_Decision.triton}" if uses_triton(torch.empty(0, device=device)) else "torch"
