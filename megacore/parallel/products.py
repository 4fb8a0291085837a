"""Several products of one input, x W1^T + b1, x W2^T + b2, ..., written out forward and backward.

The parallel layers' own autograd functions are made of these, to put communication between the steps.

Shape legend: b micro-batch, s sequence, i input features, o output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor

Parameters = Sequence[Tensor | None]  # weight, bias, weight, bias, ...; a bias may be None


def products(x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """[b, s, i] -> [b, s, o] of each weight and bias."""
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    return tuple(F.linear(x, weight, bias) for weight, bias in pairs if weight is not None)


def input_gradient(grads: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """The input's gradient, [b, s, i], from those of the products."""
    pairs = iter(zip(grads, weights, strict=True))
    grad, weight = next(pairs)
    total = grad @ weight
    for grad, weight in pairs:
        total += grad @ weight
    return total


def parameter_gradients(x: Tensor, grads: Iterable[Tensor], has_bias: Iterable[bool]) -> list[Tensor | None]:
    """The gradients of weight, bias, weight, bias, ..."""
    inputs, found = x.flatten(0, -2), list[Tensor | None]()
    for grad, biased in zip(grads, has_bias, strict=True):
        rows = grad.flatten(0, -2)
        found += [rows.t() @ inputs, rows.sum(0) if biased else None]
    return found
