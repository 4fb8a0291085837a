"""A causal language model as a list of layers: embedding, blocks, and a head of a final norm and an output layer. The
defaults are GPT-2 (Radford et al. 2019); the configuration makes it a Llama, Mistral, Qwen, GPT-NeoX or BLOOM.

Shape legend: s sequence, b micro-batch, h hidden size, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.attention import alibi_of_rank
from megacore.layers.block import TransformerBlock, build_mlp
from megacore.layers.context import BuildContext
from megacore.layers.linear import ReplicatedLinear
from megacore.layers.moe import MoE
from megacore.layers.norm import build_norm
from megacore.layers.rotary import rotaries_of
from megacore.models.outline import LayerOutline, gpt_outline
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
        split = self.sequence_parallel_group
        here = slice(tokens.shape[1]) if split.size == 1 else local_positions(tokens.shape[1], split)
        if positions is not None:
            rows_of = self.context_parallel.take(positions, 1)[:, here] + self.offset
            return self.canonical_blocks.over_positions(F.embedding, [rows_of], [self.positions])
        table: Tensor = self.positions[self.offset :] if self.offset else self.positions
        if self.context_parallel.group.size > 1:
            length = self.context_parallel.whole_length(tokens.shape[1])
            table = self.context_parallel.take(table, 0, length=length)
        return table[here]


class PredictionBlock(TransformerBlock):
    """A block of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). Block k joins the normed output
    of block k - 1, or of the model, with the embedding of the token that is k further on; the head gives the logits of
    the token after that. As in Megatron-LM and in DeepSeek's weights, what is handed on has a norm: the first block
    therefore has the model's final one.

    Args:
        size: the block's outline.
        depth: k - 1.
        mixing: arguments of `TransformerBlock`.
    """

    def __init__(
        self, config: ResolvedModel, context: BuildContext, size: LayerOutline, *, depth: int, **mixing: Any
    ) -> None:
        assert size.block is not None
        super().__init__(size.block, context, size.name, **mixing)
        h, norm = config.hidden_size, partial(build_norm, config, device=context.device)
        self.depth, self.blocks, self.sequence = depth, context.blocks, context.sequence
        self.tokens = VocabParallelEmbedding(
            config.vocab_size, h, multiple=config.make_vocab_size_divisible_by, **context.parallel_arguments
        )
        self.final_norm = norm() if depth == 0 else None
        for name, parameter in self.final_norm.named_parameters() if self.final_norm is not None else ():
            assert isinstance(parameter, ShardedParameter)
            parameter.named(f"head.norm.{name}")  # as without such blocks
        self.token_norm, self.hidden_norm, self.output_norm = norm(), norm(), norm()
        self.multiplier = config.embedding_multiplier
        self.tokens_dropout = context.hidden_dropout(config, f"{size.name}.tokens_dropout")
        self.join = ReplicatedLinear(
            2 * h, h, bias=False, products=context.products, blocks=context.blocks, device=context.device
        )

    def forward(self, x: Any) -> Any:
        """(hidden states [b, s, h], side inputs, the fields of `Scored`, normed hidden states of earlier depths) -> the
        same, with one depth more."""
        hidden, *others = x
        side = dict(zip(self.side_inputs, others, strict=False))
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        # What depth k - 1 predicts is what depth k reads: labels are shifted before ranks divide the sequence.
        tokens = others[len(self.side_inputs)][self.depth]
        if self.blocks.divide:  # labels are of whole sequences
            tokens = self.sequence.take(tokens, 1)
        embedded = self.tokens(tokens)
        if self.multiplier != 1.0:
            embedded = embedded * self.multiplier
        if self.tokens_dropout is not None:
            embedded = self.tokens_dropout(embedded)
        pair = torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], -1)
        return (self.output_norm(self.arrangement(self, self.join(pair), side)), *others, hidden)


class GPTHead(VocabParallelOutput):
    """Final norm and output layer. Given the labels too, the layer computes the loss with the logits, a chunk of the
    tokens at a time. With multi-token prediction it does so for each depth, whose hidden states are normed."""

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
        self.depths = config.mtp_num_layers
        for parameter in self.parameters():
            assert isinstance(parameter, ShardedParameter)
            parameter.used_again = self.depths > 0
        self.norm = nn.Identity() if self.depths else build_norm(config, device=context.device)

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Hidden states [b, s, h] -> logits [b, s, padded V/t]. Where the head computes the loss: (hidden states, ...,
        the three fields of `Scored`) -> summed loss, scalar fp32. The inputs between them are not read. With D depths:
        what `PredictionBlock` returns -> a tuple of 1 + D logits, or losses [1 + D], the model's own first."""
        hidden, *others = (x,) if isinstance(x, Tensor) else x
        if self.depths:
            others, earlier = others[: -self.depths], others[-self.depths :]
            scored = zip(*others[-3:], strict=True)
            outputs = [self._output(each, Scored(*one)) for each, one in zip((*earlier, hidden), scored, strict=True)]
            return torch.stack(outputs) if self.loss.in_parts else tuple(outputs)
        return self._output(hidden, Scored(*others[-3:]) if others and self.loss.in_parts else None)

    def _output(self, hidden: Tensor, scored: Scored | None) -> Tensor:
        """The summed loss, where the head computes it and knows what is scored; else logits."""
        if scored is not None and self.loss.in_parts:
            options = self.loss_options if self.training else CrossEntropyOptions()
            return self.loss.summed(self._normed(hidden), self.weight, self.bias, scored, options)
        logits = self.logits(self._normed(hidden))
        return logits if self.soft_cap is None else ops.soft_capped(logits, self.soft_cap)

    def _normed(self, hidden: Tensor) -> Tensor:
        """The output layer's input, divided instead of the logits."""
        normed = self.norm(hidden)
        return normed if self.divisor == 1.0 else normed / self.divisor


def gpt_layers(config: ResolvedModel, context: BuildContext) -> list[LayerSpec]:
    """The whole model, resolved, as layer descriptions; nothing is allocated. `context`: groups, device and what else
    the layers are built with."""
    alibi, rotaries = alibi_of_rank(config, context), rotaries_of(config, context.attended)
    ranks, kinds = context.experts, config.attention_kinds
    expert_ranks = ranks.dispatch.size * ranks.layer.size
    first, *blocks, last = gpt_outline(config, context.layer_group.size, expert_ranks=expert_ranks)
    layers = [LayerSpec.of(first, partial(GPTEmbedding, config, context))]
    for number, size in enumerate(blocks):
        assert size.block is not None
        depth = number - config.num_layers
        build: Callable[..., nn.Module] = partial(TransformerBlock, size.block, context, size.name)
        if depth >= 0:
            build = partial(PredictionBlock, config, context, size, depth=depth)
        build = partial(
            build,
            alibi=alibi,
            window=size.block.window_size,
            rotary=rotaries[kinds[min(number, config.num_layers - 1)]],
            mlp=build_mlp if size.block.experts is None else MoE,
        )
        layers.append(LayerSpec.of(size, build))
    return [*layers, LayerSpec.of(last, partial(GPTHead, config, context))]


def next_token_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """The last position's logits over the true vocabulary, for a one-rank model: [b, s, padded V] -> [b, V]."""
    return logits[:, -1, :vocab_size].float()
