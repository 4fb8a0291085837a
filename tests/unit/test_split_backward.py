"""A backward in two halves gives a layer's weights their gradients before those of the layer before it, as a whole one
does: buckets of ZeRO-3 are reduced one after the other, and not held until all are there."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megacore.parallel.recompute import computed_again
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


# ---- recomputation ---------------------------------------------------------------------------------------------------


def test_an_operator_that_keeps_its_output_is_freed_after_a_backward_that_keeps_the_graph() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = x.relu()
    with computed_again(y, x.relu):
        output = layer(y).tanh()  # tanh keeps its output
    freed = weakref.ref(output.untyped_storage())
    output.sum().backward(retain_graph=True)
    del output
    assert freed() is None
