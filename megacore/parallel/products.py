"""The matrix products of linear layers: the one seam through which all of them pass.

A linear layer computes three products: its output x W^T, the gradient of its input dY W, and the gradient of its weight
dY^T X. Every layer asks the `Products` object of its `BuildContext` for them, so that another way to multiply (FP8, for
example) is a subclass in a file of its own. `TorchProducts` is the default.

Shape legend: b microbatch, s sequence, i input features, o output features, n rows (b x s).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = Sequence[Tensor | None]  # weight, bias, weight, bias, ...; a bias may be None


class Products:
    """How linear layers multiply; a subclass overrides one product or all three.

    The layers call `linear` where autograd may do the bookkeeping, and the three products themselves where they put
    communication between them. `linear` calls the same three, each in a node of its own, so that a schedule that splits
    backward computes none of them twice.
    """

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b: [..., i] -> [..., o]; autograd does not see it."""
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """dY W: [..., o] -> [..., i]"""
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dY^T X: [n, o] and [n, i] -> [o, i]"""
        return grad.t() @ x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b for autograd: [..., i] -> [..., o]"""
        y: Tensor = _Output.apply(self, x, weight.detach(), None if bias is None else bias.detach())
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return y
        gradient = _WeightGradient.apply(self, x.detach(), y.shape, weight, bias)
        joined: Tensor = _Joined.apply(y, gradient)
        return joined


class TorchProducts(Products):
    """PyTorch's operators, and its own backward where no communication stands between the products."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)


TORCH = TorchProducts()


class _Output(torch.autograd.Function):
    """The output; backward computes only the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.products = products
        return products.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return None, ctx.products.input_gradient(grad, weight) if ctx.needs_input_grad[1] else None, None, None


class _WeightGradient(torch.autograd.Function):
    """Zeros of the output's shape, which take one number of memory, and backward the gradients of weight and bias.

    Autograd asks a node for all gradients that it can give. A schedule that wants those of weights later therefore
    needs them in another node than the input's.
    """

    @staticmethod
    def forward(
        ctx: Any, products: Products, x: Tensor, shape: torch.Size, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.products, ctx.has_bias = products, bias is not None
        return x.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return None, None, None, *parameter_gradients(ctx.products, x, [grad], [ctx.has_bias])


class _Joined(torch.autograd.Function):
    """The output as it is; backward hands its gradient to both nodes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def outputs(products: Products, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """x W^T + b of each weight and bias, [b, s, i] -> [b, s, o]; autograd does not see it."""
    return tuple(products.output(x, weight, bias) for weight, bias in _pairs(parameters))


def linears(products: Products, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """x W^T + b of each weight and bias, [b, s, i] -> [b, s, o], for autograd."""
    return tuple(products.linear(x, weight, bias) for weight, bias in _pairs(parameters))


def input_gradient(products: Products, grads: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """The gradient of the input that several linear layers share, [b, s, i], from those of their outputs."""
    pairs = iter(zip(grads, weights, strict=True))
    total = products.input_gradient(*next(pairs))
    for grad, weight in pairs:
        total += products.input_gradient(grad, weight)
    return total


def parameter_gradients(
    products: Products, x: Tensor, grads: Iterable[Tensor], has_bias: Iterable[bool]
) -> list[Tensor | None]:
    """The gradients of weight, bias, weight, bias, ... of linear layers that share the input x."""
    inputs = x.flatten(0, -2)
    gradients: list[Tensor | None] = []
    for grad, biased in zip(grads, has_bias, strict=True):
        rows = grad.flatten(0, -2)
        gradients += [products.weight_gradient(rows, inputs), rows.sum(0) if biased else None]
    return gradients


def _pairs(parameters: Parameters) -> list[tuple[Tensor, Tensor | None]]:
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]
