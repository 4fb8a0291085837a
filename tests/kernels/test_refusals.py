"""Arguments that an operator cannot work with are refused by name, before a kernel or torch stumbles over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore import ops
from tests.cases import cases

CPU = torch.device("cpu")
IDS = torch.tensor([0, 1, 2])
EMPTY = torch.ones(3, 0)
ROWS, ROW = torch.ones(3, 8), torch.ones(8)
SCORES = torch.ones(1, 1, 3, 3)
HEADS = torch.ones(1, 2, 3, 4)
TWO = ((0, 2), (2, 4))


def adamw(*, factor: Tensor | None = None, decays: Tensor | None = None, **numbers: Any) -> None:
    """A step of four parameters, but for what is given."""
    update = ops.AdamWStep(**{"step": 1, "lr": 1e-3, **numbers})
    ops.adamw_(*[torch.ones(4)] * 4, update=update, factor=factor, decays=decays)


def attended(query: Tensor = HEADS, key: Tensor = HEADS, value: Tensor = HEADS, **options: Any) -> Tensor:
    """Causal attention, but for what is given."""
    seen = {name: options.pop(name) for name in ("window", "documents") if name in options}
    return ops.attention(query, key, value, view=ops.Visibility(causal=True, **seen), **options)


def dropped(x: Tensor = ROWS, *, probability: float = 0.1, seed: Any = 0) -> Tensor:
    """dropout_add, but for what is given."""
    return ops.dropout_add(x, x, probability=probability, seed=seed)


def share(*arguments: Any) -> Tensor:
    """Cross-entropy of four columns of a share."""
    return ops.cross_entropy(torch.ones(3, 4), IDS, share=ops.VocabularyShare(*arguments))


CASES = cases("arguments-of-operators", globals())


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


ON_A_CPU = cases("tensors-on-a-cpu", globals())


@pytest.mark.parametrize("name", ON_A_CPU)
def test_triton_refuses_a_tensor_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call, argument = ON_A_CPU[name]
    with (
        ops.kernels_chosen("triton"),
        pytest.raises(ValueError, match=f"{argument} is on cpu, and the chosen impl.* use --kernels auto or torch"),
    ):
        call()


def test_squared_relu_is_the_square_of_relu() -> None:
    x = torch.linspace(-2, 2, 24).view(3, 8).t().requires_grad_()
    dy = torch.linspace(-1, 1, 24).view(8, 3)
    (expected,) = torch.autograd.grad(torch.relu(x).square(), x, dy)
    y = ops.squared_relu(x)
    torch.testing.assert_close(y, torch.relu(x).square(), rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected, rtol=1e-7, atol=0)


def test_geglu_takes_the_halves_of_a_wider_tensor() -> None:
    both = torch.randn(3, 8, requires_grad=True)
    gate, up = both.chunk(2, -1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(ops.geglu(gate, up), expected, rtol=0, atol=0)
