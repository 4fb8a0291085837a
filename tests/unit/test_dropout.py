"""Dropout against the plain expression: mask over probability, times the input."""

from __future__ import annotations

import math

import pytest
import torch

from megacore.parallel.random import Dropout, RandomStreams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_are_the_plain_product_bit_for_bit(dtype: torch.dtype) -> None:
    streams = RandomStreams(7, torch.device("cpu"))
    dropout = Dropout(0.3, streams, "blocks.0.mlp_dropout")
    x = torch.randn(5, 33, 17).to(dtype).requires_grad_()
    gradient = torch.randn(5, 33, 17).to(dtype)
    mask = torch.empty(x.shape).bernoulli_(0.7, generator=streams.generator("blocks.0.mlp_dropout", 0))
    factor = mask.div_(0.7)  # fp32, whatever x is

    output = dropout(x)
    output.backward(gradient)
    assert output.dtype == dtype
    assert torch.equal(output, (x.detach().float() * factor).to(dtype))
    assert x.grad is not None
    assert torch.equal(x.grad, (gradient.float() * factor).to(dtype))
    assert float((factor == 0).float().mean()) == pytest.approx(0.3, abs=0.05)


def test_the_mean_of_bf16_activations_stays() -> None:
    """Over n = 2^24 elements the mean strays by sqrt(p / (1 - p) / n) = 8e-5 of itself; five times that is allowed, and
    4e-4 more, as the products of only 128 different mantissas are rounded: four times 2^-9 / sqrt(3 x 128). A factor of
    1 / 0.9 in bf16, 1.109, makes the mean 1.6e-3 too small."""
    streams, p = RandomStreams(7, torch.device("cpu")), 0.1
    dropout = Dropout(p, streams, "blocks.0.mlp_dropout")
    x = (1.0 + torch.rand(2**20, generator=torch.Generator().manual_seed(5))).bfloat16()
    mean = 0.0
    for microbatch in range(16):
        streams.microbatch = microbatch
        mean += float(dropout(x).double().mean() / x.double().mean()) / 16
    assert mean == pytest.approx(1.0, abs=5 * math.sqrt(p / (1 - p) / 2**24) + 4e-4)


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
