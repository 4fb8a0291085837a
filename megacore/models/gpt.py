"""A causal language model as a list of layers: embedding, blocks, and a head of a final norm and an output layer. The
defaults are GPT-2 (Radford et al. 2019); the configuration makes it a Llama, Mistral, Qwen, GPT-NeoX or BLOOM.

Shape legend: s sequence, b micro-batch, h hidden size, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial
from typing import overload

import torch.nn.functional as F
from torch import Tensor

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.attention import alibi_of_rank
from megacore.layers.block import TransformerBlock, build_mlp
from megacore.layers.context import BuildContext
from megacore.layers.moe import MoE
from megacore.layers.norm import build_norm
from megacore.layers.rotary import rotaries_of
from megacore.models.outline import gpt_outline
from megacore.models.spec import LayerSpec
from megacore.ops import CrossEntropyOptions
from megacore.parallel.loss import Scored
from megacore.parallel.mesh import ALONE
from megacore.parallel.sequence import local_positions
from megacore.parallel.sharding import ShardedModule, ShardedParameter, replicated
from megacore.parallel.tensor import VocabParallelEmbedding, VocabParallelOutput


class GPTEmbedding(ShardedModule):
    """Token embedding, with a norm or a position table where the model has them, then dropout."""

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            multiple=config.make_vocab_size_divisible_by,
            **context.parallel_arguments,
        )
        self.norm = build_norm(config, device=context.device) if config.embedding_layernorm else None
        self.positions: ShardedParameter | None = None
        if config.position_embedding_type == "learned":
            self.positions = replicated(config.position_rows, config.hidden_size, device=context.device)
        self.offset = config.position_offset
        self.dropout = context.hidden_dropout(config, "embedding.dropout")
        self.sequence_parallel_group = context.layer_group if context.sequence_parallel else ALONE
        self.context_parallel, self.canonical_blocks = context.sequence, context.blocks
        self.side_inputs = context.side_inputs
        self.multiplier = config.embedding_multiplier

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The hidden states [b, s, h] (or, sequence parallel, [b, s/t, h]), in the form of the input. `x`: tokens [b,
        s] int64, this rank's positions; or with what `BuildContext.side_inputs` names, of whole sequences, which is
        handed on as it is."""
        if isinstance(x, Tensor):
            return self._embedded(x)
        tokens, *others = x
        return (self._embedded(tokens, dict(zip(self.side_inputs, others, strict=False)).get("positions")), *others)

    def _embedded(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        # Positions are looked up first, for backward to come to them last: it has summed the gradients of a tied token
        # table, and freed two of three tensors, before the gradient of positions allocates the bucket of both tables.
        rows = None if self.positions is None else self._positions_of(tokens, positions)
        x = self.tokens(tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.norm is not None:
            x = self.norm(x)
        if rows is not None:
            x = x + rows
        if self.dropout is not None:
            x = self.dropout(x)
        return x

    def _positions_of(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Rows of the table for the positions that this rank holds."""
        assert self.positions is not None
        here = local_positions(tokens.shape[1], self.sequence_parallel_group)
        if positions is not None:
            rows_of = self.context_parallel.take(positions, 1)[:, here] + self.offset
            return self.canonical_blocks.over_positions(F.embedding, [rows_of], [self.positions])
        table: Tensor = self.positions[self.offset :] if self.offset else self.positions
        if self.context_parallel.group.size > 1:
            length = self.context_parallel.whole_length(tokens.shape[1])
            table = self.context_parallel.take(table, 0, length=length)
        return table[here]


class GPTHead(VocabParallelOutput):
    """Final norm and output layer. Given the labels too, the layer computes the loss with the logits, a chunk of the
    tokens at a time."""

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__(
            config.vocab_size,
            config.hidden_size,
            multiple=config.make_vocab_size_divisible_by,
            bias=config.add_output_layer_bias,
            **context.linear_arguments,
        )
        self.divisor, self.soft_cap = config.logits_divisor, config.final_logit_softcapping
        self.loss, self.loss_options = context.chunked_loss(config.vocab_size, self.soft_cap), context.loss_options
        self.norm = build_norm(config, device=context.device)

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Hidden states [b, s, h] -> logits [b, s, padded V/t]. Where the head computes the loss: (hidden states, ...,
        the three fields of `Scored`) -> summed loss, scalar fp32. The inputs between them are not read."""
        hidden, *others = (x,) if isinstance(x, Tensor) else x
        if others and self.loss.in_parts:
            options = self.loss_options if self.training else CrossEntropyOptions()
            return self.loss.summed(self._normed(hidden), self.weight, self.bias, Scored(*others[-3:]), options)
        logits = self.logits(self._normed(hidden))
        return logits if self.soft_cap is None else ops.soft_capped(logits, self.soft_cap)

    def _normed(self, hidden: Tensor) -> Tensor:
        """The output layer's input, divided instead of the logits."""
        normed = self.norm(hidden)
        return normed if self.divisor == 1.0 else normed / self.divisor


def gpt_layers(config: ResolvedModel, context: BuildContext) -> list[LayerSpec]:
    """The whole model, resolved, as layer descriptions; nothing is allocated. `context`: groups, device and what else
    the layers are built with."""
    block = partial(TransformerBlock, context=context, alibi=alibi_of_rank(config, context))
    rotaries = rotaries_of(config, context.attended)
    ranks = context.experts
    expert_ranks = ranks.dispatch.size * ranks.layer.size
    first, *blocks, last = gpt_outline(config, context.layer_group.size, expert_ranks=expert_ranks)
    return [
        LayerSpec.of(first, partial(GPTEmbedding, config, context)),
        *(
            LayerSpec.of(
                size,
                partial(
                    block,
                    size.block,
                    name=size.name,
                    window=None if size.block is None else size.block.window_size,
                    rotary=rotaries[kind],
                    mlp=build_mlp if size.block is None or size.block.experts is None else MoE,
                ),
            )
            for size, kind in zip(blocks, config.attention_kinds, strict=True)
        ),
        LayerSpec.of(last, partial(GPTHead, config, context)),
    ]


def next_token_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """The last position's logits over the true vocabulary, for a one-rank model: [b, s, padded V] -> [b, V]."""
    return logits[:, -1, :vocab_size].float()
