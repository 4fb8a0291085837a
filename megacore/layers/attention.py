"""Multi-head causal self-attention, its heads split over the tensor-parallel group.

The fused projection is laid out by head, [head][q, k, v][d], so that a rank's heads are one contiguous slice of it.

Shape legend: s sequence, b micro-batch, h hidden size, n heads, d = h / n, t tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.config import ModelConfig
from megacore.layers.context import BuildContext
from megacore.parallel.recompute import recompute
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class CausalSelfAttention(nn.Module):
    """Attention as in Vaswani et al. 2017 (arXiv 1706.03762, section 3.2), with dropout on the attention weights.

    Args:
        config: sizes and dropout; the group's size divides the number of heads.
        context: where the layer stands.
        name: the layer's global name.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, name: str) -> None:
        super().__init__()
        h = config.hidden_size
        self.head_size = h // config.num_attention_heads
        self.dropout, self.streams = config.attention_dropout, context.streams
        self.site, self.shard = name, context.tp.rank
        self.recomputes, self.implementation = context.recompute_attention, context.attention
        self.qkv = ColumnParallelLinear(h, 3 * h, **context.column_arguments)
        self.output = RowParallelLinear(h, h, **context.parallel_arguments)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h] (or, sequence parallel, [b, s/t, h] -> [b, s/t, h])"""
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))  # [b, s, n/t, 3, d]
        query, key, value = heads.permute(3, 0, 2, 1, 4).unbind(0)  # [b, n/t, s, d] each, views
        if self.recomputes and torch.is_grad_enabled():
            mixed = recompute(self._mix, query, key, value, streams=self.streams)
        else:
            mixed = self._mix(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.causal_attention(query, key, value, dropout=self._dropout(), implementation=self.implementation)

    def _dropout(self) -> float:
        """The probability to apply now; seeds the generator that the fused operator draws from, which takes no
        other."""
        if not self.training or self.dropout == 0.0:
            return 0.0
        torch.manual_seed(self.streams.key(self.site, self.shard))
        return self.dropout
