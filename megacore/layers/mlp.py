"""The position-wise MLP, its inner width split over the tensor-parallel group."""

from __future__ import annotations

from torch import Tensor, nn

from megacore import ops
from megacore.config import ModelConfig, known
from megacore.layers.context import BuildContext
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """h -> ffn_hidden_size -> h with GELU between; one all-reduce forward and one backward.

    Args:
        config: sizes; the group's size divides `ffn_hidden_size`.
        context: where the layer stands.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        h, inner = config.hidden_size, known(config.ffn_hidden_size)
        self.up = ColumnParallelLinear(h, inner, **context.column_arguments)
        self.down = RowParallelLinear(inner, h, **context.parallel_arguments)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        return self.down(ops.gelu(self.up(x)))
