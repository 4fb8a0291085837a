"""Layers and functions compiled with torch.compile: one graph of a block's forward and one of its backward.

A layer keeps its class, its parameters and their names; only its `forward` is replaced. Layers of one class and shape
share their compiled code. Therefore nothing that differs between layers or steps may be a number in Python, which
torch.compile would write into the code and compile anew for the next. `Prepared.prepare` turns it into tensors before
each call.

Where a schedule computes the gradients of inputs and of weights separately, compiled code ends at the linear layers:
the backward of compiled code is one piece, and would compute the weights' gradients twice. What lies between the linear
layers is compiled.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from megacore.parallel.products import Products

Backend = Literal["inductor", "aot-eager"]

Function = TypeVar("Function", bound=Callable[..., Any])

_BACKENDS = {"inductor": "inductor", "aot-eager": "aot_eager"}
# Blocks of a model differ in a few ways (windows, a first block without a norm), each in training and in evaluation.
_VARIANTS = 64


@runtime_checkable
class Prepared(Protocol):
    """A module that reads tensors in its forward which only plain Python can make. Methods whose names a module lists
    in an attribute `uncompiled` run as they are: compiled code ends before them and starts again behind them."""

    def prepare(self, x: Tensor) -> None:
        """Make them. `x`: the hidden states that enter the layer."""


class _UncompiledLinears(Products):
    """Matrix products at which compiled code ends, so that autograd sees the backward of each linear layer."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._products.output(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._products.input_gradient(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return self._products.weight_gradient(grad, x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._products.linear(x, weight, bias)


def compile_layer(
    layer: nn.Module, *, backend: Backend = "inductor", fixed_shapes: bool = True, split_backward: bool = False
) -> None:
    """Let the layer's forward and backward run as compiled code, from its first call on.

    Args:
        layer: takes a tensor, or a tuple of tensors whose first one is the hidden states.
        backend: `inductor` generates kernels; `aot-eager` runs the captured graphs with torch's operators.
        fixed_shapes: whether the layer's input has one shape, or a few; otherwise the second shape is compiled for all.
        split_backward: gradients of inputs and of weights may be computed separately.
    """
    if split_backward:
        as_they_are = {id(inner) for module in layer.modules() if _runs_as_it_is(module) for inner in module.modules()}
        for module in layer.modules():
            if id(module) in as_they_are:
                continue
            if isinstance(products := getattr(module, "products", None), Products):
                apart = _UncompiledLinears(products)
                apart.linear = torch.compiler.disable(apart.linear)  # type: ignore[method-assign]
                module.products = apart  # type: ignore[assignment]
    for module in layer.modules():
        for name in getattr(module, "uncompiled", ()):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    prepared = [module for module in layer.modules() if isinstance(module, Prepared)]

    def prepare(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0][0] if isinstance(inputs[0], tuple) else inputs[0]
        for module in prepared:
            module.prepare(x)

    if prepared:
        layer.register_forward_pre_hook(prepare)
    layer.forward = compile_function(
        layer.forward, backend=backend, fixed_shapes=fixed_shapes, split_backward=split_backward
    )


def _runs_as_it_is(module: nn.Module) -> bool:
    return "forward" in getattr(module, "uncompiled", ())


def compile_function(
    function: Function, *, backend: Backend = "inductor", fixed_shapes: bool = True, split_backward: bool = False
) -> Function:
    """A function of tensors that runs as compiled code, from its first call on. torch's settings for it hold during its
    calls only: other compiled functions of the process keep theirs. `function`: has no linear layers, if
    `split_backward`. The settings are those of `compile_layer`."""
    # Random operators of plain layers stay those of torch: they draw the same masks as without compiling.
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    dynamic = False if fixed_shapes else None
    compiled: Any = torch.compile(function, backend=_BACKENDS[backend], options=options, dynamic=dynamic)
    dynamo = torch._dynamo.config
    compiled = dynamo.patch(recompile_limit=max(dynamo.recompile_limit, _VARIANTS))(compiled)
    if split_backward:
        # The second half of a backward walks through the graph of the first again, which needs all that it has saved.
        compiled = torch._functorch.config.patch(donated_buffer=False)(compiled)
    return cast(Function, compiled)


class _Alias(torch.autograd.Function):
    """The identity; its result is no view for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def alias(x: Tensor) -> Tensor:
    """x, for compiled code whose backward writes its gradient over it: torch refuses to capture this for the view that
    an autograd function has made, such as the output of a layer with sharded weights or a split backward."""
    result: Tensor = _Alias.apply(x)
    return result


def why_not_compile(backend: Backend, device: torch.device) -> str | None:
    """Why the backend cannot run on a device, in a sentence; None if it can."""
    if backend != "inductor" or device.type != "cpu":
        return None
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return (
            f"needs a C++ compiler on the CPU, and {compiler} is not installed: install it (Debian: apt install "
            "g++), let CXX name another one, use --compile backend=aot-eager, or leave --compile out"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            "needs Python's C headers on the CPU, and they are not installed: install them (Debian: apt install "
            "python3-dev), use --compile backend=aot-eager, or leave --compile out"
        )
    return None
