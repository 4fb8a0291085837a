"""One comparison for every operator: results and gradients against the same formula in double precision.

An error is measured against the largest number of the tensor it is in. In fp32 sums of a few thousand terms in another
order leave some 1e-6 of it. 16-bit results carry the rounding of the result, and gradients also that of the stored
forward result; Triton's interpreter cuts off where a GPU rounds to nearest when it narrows to bf16, so that a unit in
the last place (2^-7 of a number just above a power of two) is allowed, and half as much again for two such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Comparison:
    """An operator, what it should compute, and inputs.

    Attributes:
        name: of the operator and what is special about the inputs.
        operator: takes the inputs by name.
        oracle: the same function in plain torch, for double precision.
        shapes: of the inputs, which are normally distributed.
        reference: the plain-torch form of the custom operator, where `operator` does not reach it.
        fixed: inputs that stay as they are (masks, targets).
        scale: of inputs that are not to have a standard deviation of 1.
        is_large: Triton's interpreter takes long: `make test` has it in bf16 alone.
    """

    name: str
    operator: Function
    oracle: Function
    shapes: Mapping[str, tuple[int, ...]]
    reference: Function | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    is_large: bool = False

    def __str__(self) -> str:
        return self.name


def compare(comparison: Comparison, function: Function, dtype: torch.dtype, device: torch.device) -> None:
    """Run the function and the oracle on the same numbers; results and gradients must agree."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    scale = comparison.scale
    inputs = {name: random(shape, scale.get(name, 1.0)).requires_grad_() for name, shape in comparison.shapes.items()}
    fixed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in comparison.fixed.items()}
    results = _as_tuple(function(**inputs, **fixed))
    cotangents = [random(tuple(result.shape)) for result in results]
    gradients = torch.autograd.grad(
        results, list(inputs.values()), [g.to(r.dtype) for g, r in zip(cotangents, results, strict=True)]
    )

    doubles = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    expected = _as_tuple(comparison.oracle(**doubles, **fixed))
    expected_gradients = torch.autograd.grad(expected, list(doubles.values()), [g.double() for g in cotangents])
    for index, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        _close(found, wanted, dtype, f"result {index}")
    for name, found, wanted in zip(inputs, gradients, expected_gradients, strict=True):
        assert found.dtype == dtype
        _close(found, wanted, dtype, f"gradient of {name}")


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _close(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.shape == wanted.shape, what
    assert torch.isfinite(found).all(), f"{what} is not finite"
    if wanted.numel():
        error, largest = (found.double() - wanted).abs().max().item(), wanted.abs().max().item()
        bound = TOLERANCE[dtype] * max(largest, 0.1)
        assert error <= bound, f"{what}: error {error:.3e}, allowed {bound:.3e} (largest {largest:.3e})"
