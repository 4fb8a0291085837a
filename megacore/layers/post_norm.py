"""The block of the original transformer and of BERT: the norm comes after the residual sum, not before the layer."""

from __future__ import annotations

from torch import Tensor, nn

from megacore.config import ResolvedModel
from megacore.layers.attention import SelfAttention
from megacore.layers.context import BuildContext
from megacore.layers.mlp import MLP
from megacore.layers.norm import build_norm
from megacore.parallel.random import Dropout


class PostNormBlock(nn.Module):
    """Bidirectional attention and MLP, each added to its input and then normed (Vaswani et al. 2017, arXiv 1706.03762,
    section 3.1; Devlin et al. 2018, arXiv 1810.04805).

    Args:
        config: sizes and dropout.
        context: where the layer stands.
        name: the block's global name, `blocks.17`.
    """

    def __init__(self, config: ResolvedModel, context: BuildContext, name: str) -> None:
        super().__init__()
        drop, shard = config.hidden_dropout, context.residual_shard
        self.attention = SelfAttention(config, context, f"{name}.attention", causal=False)
        self.attention_dropout = Dropout(drop, context.streams, f"{name}.attention_dropout", shard=shard)
        self.attention_norm = build_norm(config, device=context.device)
        self.mlp = MLP(config, context)
        self.mlp_dropout = Dropout(drop, context.streams, f"{name}.mlp_dropout", shard=shard)
        self.mlp_norm = build_norm(config, device=context.device)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden states [b, s, h] and document numbers [b, s] -> the same"""
        x, documents = inputs
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, documents)))
        return self.mlp_norm(x + self.mlp_dropout(self.mlp(x))), documents
