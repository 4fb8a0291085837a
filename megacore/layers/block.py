"""One transformer block: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from typing import overload

from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.attention import SelfAttention
from megacore.layers.context import BuildContext
from megacore.layers.mlp import MLP
from megacore.layers.norm import build_norm
from megacore.layers.rotary import Rotary
from megacore.parallel.random import Dropout


class TransformerBlock(nn.Module):
    """The pre-norm block of GPT-2 (Radford et al. 2019, section 2.3), or with attention and MLP side by side, as in
    GPT-NeoX (Black et al. 2022, arXiv 2204.06745, section 2.1).

    Args:
        config: sizes, kinds of layers and dropout.
        context: where the layer stands.
        name: the block's global name, `blocks.17`.
        causal: as for SelfAttention, and so are
        window: the most recent positions that are seen,
        rotary: the rotation by positions,
        alibi: and the bias by distance.
        attention_norm: whether there is a norm before attention; ModernBERT's first block has none.
    """

    def __init__(
        self,
        config: ResolvedModel,
        context: BuildContext,
        name: str,
        *,
        causal: bool = True,
        window: int | None = None,
        rotary: Rotary | None = None,
        alibi: ops.Alibi | None = None,
        attention_norm: bool = True,
    ) -> None:
        super().__init__()
        drop, shard = config.hidden_dropout, context.residual_shard
        self.parallel = config.parallel_residual
        self.attention_norm = build_norm(config, device=context.device) if attention_norm else nn.Identity()
        self.attention = SelfAttention(
            config, context, f"{name}.attention", causal=causal, window=window, rotary=rotary, alibi=alibi
        )
        self.attention_dropout = Dropout(drop, context.streams, f"{name}.attention_dropout", shard=shard)
        self.mlp_norm = build_norm(config, device=context.device)
        self.mlp = MLP(config, context)
        self.mlp_dropout = Dropout(drop, context.streams, f"{name}.mlp_dropout", shard=shard)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The block's output, in the form of its input.

        Args:
            x: [b, s, h]; or with documents [b, s], or documents and positions [b, s], as for SelfAttention, which are
                handed on as they are.
        """
        if isinstance(x, Tensor):
            return self._apply_to(x)
        hidden, *where = x
        return (self._apply_to(hidden, *where), *where)

    def _apply_to(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        attended = self.attention_dropout(self.attention(self.attention_norm(x), documents, positions))
        if self.parallel:
            return x + attended + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        x = x + attended
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
