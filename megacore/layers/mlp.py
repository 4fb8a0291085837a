"""The position-wise MLP, its inner width split over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.context import BuildContext
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, columns_parallel

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": ops.gelu,
    "gelu-exact": partial(ops.gelu, exact=True),
    "relu": torch.relu,
}
_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": ops.swiglu,
    "geglu": ops.geglu,
    "geglu-exact": partial(ops.geglu, exact=True),
}


class MLP(nn.Module):
    """h -> ffn_hidden_size -> h with an activation between; one all-reduce forward and one backward.

    A gated one (Shazeer 2020, arXiv 2002.05202) multiplies two projections of its input, which are parameters of their
    own, so that a rank's slice of each is contiguous; they share the communication of that input.

    Args:
        config: sizes, biases, activation; the group's size divides `ffn_hidden_size`.
        context: where the layer stands.
    """

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        h, inner, bias = config.hidden_size, config.inner_size, not config.disable_bias_linear
        self.activation = config.activation
        self.gate: ColumnParallelLinear | None = None
        if config.gated:
            self.gate = ColumnParallelLinear(h, inner, bias=bias, **context.column_arguments)
        self.up = ColumnParallelLinear(h, inner, bias=bias, **context.column_arguments)
        self.down = RowParallelLinear(inner, h, bias=bias, **context.linear_arguments)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        if self.gate is None:
            return self.down(_ACTIVATIONS[self.activation](self.up(x)))
        gate, up = columns_parallel(x, [self.gate, self.up])
        return self.down(_GATES[self.activation](gate, up))
