"""What operators keep while the output of an earlier one is computed again is freed with their graph, also where a
backward has kept the graph for a second half."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from megacore.parallel.recompute import computed_again


def test_an_operator_that_keeps_its_output_is_freed_after_a_backward_that_keeps_the_graph() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = x.relu()
    with computed_again(y, x.relu):
        output = layer(y).tanh()  # tanh keeps its output
    freed = weakref.ref(output.untyped_storage())
    output.sum().backward(retain_graph=True)
    del output
    assert freed() is None
