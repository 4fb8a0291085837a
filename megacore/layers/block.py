"""One transformer block: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megacore.config import ModelConfig
from megacore.layers.attention import CausalSelfAttention
from megacore.layers.context import BuildContext
from megacore.layers.mlp import MLP
from megacore.layers.norm import LayerNorm
from megacore.parallel.random import Dropout


class TransformerBlock(nn.Module):
    """The pre-norm block of GPT-2 (Radford et al. 2019, section 2.3).

    Args:
        config: sizes and dropout.
        context: where the layer stands.
        name: the block's global name, `blocks.17`.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, name: str) -> None:
        super().__init__()
        h, epsilon, drop = config.hidden_size, config.norm_epsilon, config.hidden_dropout
        shard = context.residual_shard
        self.attention_norm = LayerNorm(h, epsilon, device=context.device)
        self.attention = CausalSelfAttention(config, context, f"{name}.attention")
        self.attention_dropout = Dropout(drop, context.streams, f"{name}.attention_dropout", shard=shard)
        self.mlp_norm = LayerNorm(h, epsilon, device=context.device)
        self.mlp = MLP(config, context)
        self.mlp_dropout = Dropout(drop, context.streams, f"{name}.mlp_dropout", shard=shard)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
