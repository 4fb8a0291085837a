"""The way into every operator: which implementation runs, and what its arguments must be.

The implementation is decided once at launch, the same for every operator: `auto` is Triton for tensors on a GPU where
Triton is installed, and plain torch elsewhere, also in what torch.compile compiles: it makes fewer kernels of that.
Tests choose for a while with `kernels_chosen`. Triton is imported by the first operator that needs it and never
otherwise: it is optional, and takes a second to load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from megacore.kernels.availability import has_triton, triton_version

Choice = Literal["auto", "triton", "torch"]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class _Decision:
    """The choice in force. Like torch's backend switches it belongs to the process, not to a model: an operator that
    torch.compile or autograd calls gets only tensors."""

    choice: Choice = "auto"
    has_triton: bool = has_triton()


def why_not(choice: Choice, device: torch.device) -> str | None:
    """Why the choice cannot run on a device, in a sentence; None if it can."""
    if choice != "triton":
        return None
    if not _Decision.has_triton:
        return "needs Triton, which is not installed: pip install triton, or use --kernels auto or torch"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "runs on a GPU, and this run computes on the CPU: use --kernels auto or torch, or, to try the kernels in "
            "Triton's slow interpreter, set TRITON_INTERPRET=1"
        )
    return None


def choose_kernels(choice: Choice) -> None:
    """Decide for the rest of the process. Raises ValueError where there is no such choice."""
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
        return x.is_cuda and _Decision.has_triton and not torch.compiler.is_compiling()
    return _Decision.choice == "triton"


def is_triton_asked_for() -> bool:
    """Whether Triton was chosen by name, and is not only what `auto` found."""
    return _Decision.choice == "triton"


def on_accelerator(x: Tensor) -> bool:
    """Whether operators on this tensor are kernels that the host launches one by one: fewer and larger ones are faster
    there. Not in what torch.compile compiles. With Triton chosen on a CPU as on the GPU that it stands for."""
    if torch.compiler.is_compiling():
        return False
    return x.device.type != "cpu" or _Decision.choice == "triton"


def is_fused(x: Tensor) -> bool:
    """Whether torch.compile is to see what the operator does, and fuse it with its neighbours."""
    return torch.compiler.is_compiling() and not uses_triton(x)


def runs_triton(x: Tensor, name: str = "x") -> bool:
    """`uses_triton` of an implementation about to run, which needs numbers that a kernel can read. `name`: by which
    callers know the tensor. Raises ValueError where triton was chosen, and cannot run where the tensor is."""
    if _Decision.choice != "triton":
        return uses_triton(x)
    if (reason := why_not("triton", x.device)) is not None:
        raise ValueError(f"{name} is on {x.device}, and the chosen implementation, triton, {reason}")
    return True


def triton_serves(device: torch.device) -> bool:
    """Whether operators on tensors of a device run as Triton kernels."""
    return uses_triton(torch.empty(0, device=device))


def described(device: torch.device) -> str:
    """The implementation that operators on a device run, for the launch summary."""
    return f"triton {triton_version()}" if triton_serves(device) else "torch"


# ---- operators that torch knows


class Node(torch.autograd.Function):
    """An autograd function without transforms of torch.func: calling it takes the host less. For those
    `torch.autograd.Function.apply` examines all arguments in every call."""

    _apply: Callable[..., Any]  # that of torch.autograd.Function's parent, for the class

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super().apply(*arguments) if transforms_active() else cls._apply(*arguments)


def custom_op(
    name: str, *, mutates_args: Sequence[str], schema: str | None = None
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """As `torch.library.custom_op`, but its first call does not load torch's compiler, which takes every rank two
    seconds and 150 MB: an operator is kept out of the compiler only where something else has loaded it."""

    def decorated(function: Callable[..., Any]) -> CustomOpDef:
        made = torch.library.custom_op(name, mutates_args=tuple(mutates_args), schema=schema)(function)
        for device, implementation in made._backend_fns.items():
            made._backend_fns[device] = _kept_out(implementation)
        return made

    return decorated


def _kept_out(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = getattr(function, "__wrapped__", function)  # of torch._disable_dynamo

    def called(*arguments: Any, **named: Any) -> Any:
        return (function if "torch._dynamo" in sys.modules else inner)(*arguments, **named)

    return called


class Operator:
    """A function as an operator: for fake tensors, dispatch modes, torch.func and torch.compile a
    `torch.library.custom_op`, else the function itself in an autograd node, which takes the host a third of the time.
    `name`: `megacore::` and the operator's name. `function`: from positional arguments to new tensors; writes to none
    of its arguments."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.custom_op = custom_op(name, mutates_args=())(function)
        self._name, self._function = name, function
        self._node: Callable[..., Any] | None = None  # the function in an autograd node, if it has a gradient

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.custom_op.register_fake(function)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None], results: int | None = None
    ) -> None:
        """The gradient, as for `torch.library.custom_op`. `backward`: from the context and the gradients of the
        results. `results`: how many the autograd node gives its callers; `setup_context` gets all. None: all, as
        without gradients."""
        self.custom_op.register_autograd(backward, setup_context=setup_context)
        function = self._function

        def forward(ctx: Any, *arguments: Any) -> Any:  # with a `setup_context` torch inspects signatures in every call
            output = function(*arguments)
            setup_context(ctx, arguments, output)
            return output if results is None else output[:results]

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        node: Any = type(self._name, (Node,), members)
        self._node = node._apply

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or is_in_torch_dispatch_mode() or transforms_active():
            return self.custom_op(*arguments)  # other compilers run a dispatch mode
        if self._node is None or not torch.is_grad_enabled():
            return self._function(*arguments)
        return self._node(*arguments)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function an `Operator`."""

    def make(function: Callable[..., Any]) -> Operator:
        return Operator(name, function)

    return make


# ---- checks of arguments: every refusal names the argument, what it is, and what is expected


def fit(
    x: Tensor, *, vectors: Sequence[Tensor | None] = (), alike: Sequence[Tensor | None] = ()
) -> Literal["torch", "triton"] | None:
    """Which implementation runs; None where arguments do not pass the checks of rows, shapes, dtypes, strides and
    devices below. Nearly all do: an operator asks this first, which takes one pass and builds no messages. `x`: [...,
    h]. `vectors`: [h] each, or None. `alike`: of x's shape each, or None."""
    shape, kind, device = x.shape, x.dtype, x.device
    if not shape or shape[-1] == 0 or kind not in FLOATS or not x.is_contiguous():
        return None
    for expected, tensors in ((shape[-1:], vectors), (shape, alike)):
        for y in tensors:
            if y is None:
                continue
            if y.shape != expected or y.dtype is not kind or y.device != device or not y.is_contiguous():
                return None
    if _Decision.choice == "torch" or (_Decision.choice == "auto" and not x.is_cuda):
        return "torch"
    return "triton" if uses_triton(x) else "torch"


def require_alike(**tensors: Tensor) -> None:
    """Contiguous, of one of the three float types, on one device. Raises ValueError as the three checks below say
    it."""
    require_same_device(**tensors)
    require_floats(**tensors)
    require_contiguous(**tensors)


def require_floats(**tensors: Tensor) -> None:
    """fp32, fp16 or bf16, all alike. Raises ValueError where one is of another type than these, or than the first."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {_short(tensor.dtype)}: it must be float32, float16 or bfloat16")
        if tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {_short(tensor.dtype)}: it must be {_short(first.dtype)}, like {first_name}")


def require_same_device(**tensors: Tensor) -> None:
    """All on the first one's device. Raises ValueError where one is elsewhere."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}: it must be on {first.device}, like {first_name}")


def require_shape(shape: tuple[int, ...], why: str, **tensors: Tensor) -> None:
    """All of one shape. Raises ValueError where one has another shape."""
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be {tuple(shape)}, {why}")


def require_contiguous(**tensors: Tensor) -> None:
    """Rows one after the other, without gaps. Raises ValueError where one has other strides."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: it must be contiguous; "
                f"call {name}.contiguous()"
            )


def has_whole_heads(*tensors: Tensor) -> bool:
    """Whether the elements of every tensor's last dimension lie side by side, whatever the other strides are."""
    for x in tensors:  # noqa: SIM110  a generator would be entered once for each of them
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            return False
    return True


def require_integers(**tensors: Tensor) -> None:
    """int32 or int64. Raises ValueError where one is of another type."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {_short(tensor.dtype)}: it must be int64 or int32")


def require_rows(**tensors: Tensor) -> None:
    """Raises ValueError where a tensor has no dimension, or an empty last one."""
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or tensor.shape[-1] == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: its last dimension must hold something")


def require_whole(**numbers: int | None) -> None:
    """Whole numbers, or None. Raises ValueError where one is something else."""
    for name, number in numbers.items():
        if number is not None and not isinstance(number, (int, torch.SymInt)):
            raise ValueError(f"{name} is {number}: it must be a whole number")


def require(condition: bool, message: str) -> None:
    """A condition in words. Raises ValueError where it does not hold."""
    if not condition:
        raise ValueError(message)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
