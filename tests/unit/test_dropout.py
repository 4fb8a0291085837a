"""Dropout against the plain expression: mask over probability, times the input."""

from __future__ import annotations

import pytest
import torch

from megacore.parallel.random import Dropout, RandomStreams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_are_the_plain_product_bit_for_bit(dtype: torch.dtype) -> None:
    streams = RandomStreams(7, torch.device("cpu"))
    dropout = Dropout(0.3, streams, "blocks.0.mlp_dropout")
    x = torch.randn(5, 33, 17).to(dtype).requires_grad_()
    gradient = torch.randn(5, 33, 17).to(dtype)
    factor = torch.empty_like(x).bernoulli_(0.7, generator=streams.generator("blocks.0.mlp_dropout", 0)).div_(0.7)

    output = dropout(x)
    output.backward(gradient)
    assert torch.equal(output, x.detach() * factor)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient * factor)
    assert float((factor == 0).float().mean()) == pytest.approx(0.3, abs=0.05)


def test_one_byte_an_element_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    dropout = Dropout(0.1, RandomStreams(7, torch.device("cpu")), "blocks.0.mlp_dropout")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(torch.randn(8, 16, requires_grad=True))
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 8 * 16


def test_evaluation_and_probability_zero_change_nothing() -> None:
    streams, x = RandomStreams(7, torch.device("cpu")), torch.randn(3, 4)
    assert Dropout(0.1, streams, "site").eval()(x) is x
    assert Dropout(0.0, streams, "site")(x) is x
