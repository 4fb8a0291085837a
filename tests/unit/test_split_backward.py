"""A backward in two halves gives a layer's weights their gradients before those of the layer before it, as a whole one
does: buckets of ZeRO-3 are reduced one after the other, and not held until all are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megacore.pipeline.backward import input_half

LAYERS = 4


class Gated(nn.Module):
    """Two branches, of which the walk through the graph sees one after all that lies before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.gate(x)) * self.up(x))
        return found


def arrivals(layers: nn.Sequential) -> list[tuple[int, str]]:
    """Layer and name of each weight, once gradients appear."""
    found: list[tuple[int, str]] = []
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, place=(number, name): found.append(place))
    return found


def test_the_second_half_goes_back_layer_by_layer() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[Gated() for _ in range(LAYERS)])
    x = torch.randn(3, 8)
    layers(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in layers.named_parameters()}
    layers.zero_grad()

    order = arrivals(layers)
    first = layers[0](x)  # the anchor where the input needs no gradient
    loss = layers[1:](first).square().sum()
    _, half = input_half([get_gradient_edge(loss)], [torch.ones(())], [get_gradient_edge(first)])
    assert order == []
    half.run()
    assert len(order) == len(set(order)) == len(expected)
    numbers = [number for number, _ in order]
    assert numbers == sorted(numbers, reverse=True)
    for name, parameter in layers.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name]), name  # type: ignore[arg-type]


class Doubled(torch.autograd.Function):
    """A node that is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2.0 * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2.0 * grad * weight, 2.0 * grad * x


def test_the_second_half_has_nodes_that_only_the_graph_owns() -> None:
    """torch 2.11 drops a node that is written in Python with the tensors of its graph."""
    x, weights = torch.randn(3, requires_grad=True), [torch.randn(3, requires_grad=True) for _ in range(2)]
    y = Doubled.apply(Doubled.apply(x, weights[0]) + 1.0, weights[1])
    outputs = [get_gradient_edge(y)]
    expected = torch.autograd.grad(y, weights, torch.ones(3), retain_graph=True)
    _, half = input_half(outputs, [torch.ones(3)], [get_gradient_edge(x)])
    del y, outputs
    half.run()
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None and torch.equal(weight.grad, gradient)
