"""BERT, classic (Devlin et al. 2018, arXiv 1810.04805) and modern (Warner et al. 2024, arXiv 2412.13663). Beside the
hidden states the layers hand on the document numbers of all positions [b, s]: positions see those of the same number,
and padding, 0, is seen by nobody. So one model serves padded pairs and packed documents.

Shape legend: s sequence, b micro-batch, h hidden size, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBertConfig
from megacore.layers.block import PostNormBlock, TransformerBlock
from megacore.layers.context import BuildContext
from megacore.layers.linear import ReplicatedLinear
from megacore.layers.norm import build_norm
from megacore.layers.rotary import Rotary
from megacore.models.flops import block_flops, head_flops
from megacore.models.outline import bert_block, bert_outline
from megacore.models.spec import LayerSpec
from megacore.parallel.collectives import reduce_from_group
from megacore.parallel.loss import Scored
from megacore.parallel.mesh import ALONE
from megacore.parallel.sequence import local_positions
from megacore.parallel.sharding import ShardedModule, ShardedParameter, replicated
from megacore.parallel.tensor import VocabParallelEmbedding, VocabParallelOutput

# Logits of the tokens [b, s, padded V/t], and of the sentence task [b, 2]. Where the head computes the loss, the summed
# loss of the tokens replaces their logits, and in an evaluation also the likeliest tokens [b, s].
Output = Tensor | tuple[Tensor, ...]


class BertEmbedding(ShardedModule):
    """Token embedding, in the classic style plus position and segment embedding; then norm and dropout."""

    def __init__(self, config: ResolvedBertConfig, context: BuildContext) -> None:
        super().__init__()
        model, device = config.model, context.device
        h = model.hidden_size
        self.tokens = VocabParallelEmbedding(
            model.vocab_size,
            h,
            multiple=model.make_vocab_size_divisible_by,
            **context.parallel_arguments,
        )
        self.positions: ShardedParameter | None = None
        self.segments: ShardedParameter | None = None
        if not config.bert.packed:
            self.positions = replicated(model.position_rows, h, device=device)
            self.segments = replicated(config.bert.num_token_types, h, device=device)
        self.offset = model.position_offset
        self.norm = build_norm(model, device=device)
        self.dropout = context.hidden_dropout(model, "embedding.dropout")
        self.split = context.layer_group if context.sequence_parallel else ALONE
        self.sequence, self.blocks = context.sequence, context.blocks

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens and segments of this rank's positions, and document numbers of whole sequences, [b, s] int64 each ->
        hidden states [b, s, h] (or, sequence parallel, [b, s/t, h]) and the document numbers"""
        tokens, segments, documents = inputs
        if self.positions is None or self.segments is None:
            x = self.tokens(tokens)
        else:
            # Before the tokens: backward then makes the bucket of all tables after it has summed the gradients of the
            # token table, which the head shares.
            table: Tensor = self.positions[self.offset :] if self.offset else self.positions
            if self.sequence.group.size > 1:
                table = self.sequence.take(table, 0, length=self.sequence.whole_length(tokens.shape[1]))
            positions = local_positions(tokens.shape[1], self.split)
            rows = table[positions]
            kinds = self.blocks.over_positions(F.embedding, [segments[:, positions]], [self.segments])
            x = self.tokens(tokens) + kinds + rows
        x = self.norm(x)
        return x if self.dropout is None else self.dropout(x), documents


class BertHead(VocabParallelOutput):
    """The output layer over every position, its rows those of the embedding, and the sentence task's over the first."""

    def __init__(self, config: ResolvedBertConfig, context: BuildContext) -> None:
        model, device, h = config.model, context.device, config.model.hidden_size
        super().__init__(
            model.vocab_size, h, multiple=model.make_vocab_size_divisible_by, bias=True, **context.linear_arguments
        )
        self.loss, self.loss_options = context.chunked_loss(model.vocab_size), context.loss_options
        self.norm = build_norm(model, device=device) if config.bert.packed else nn.Identity()  # after pre-norm blocks
        self.transform = ReplicatedLinear(
            h,
            h,
            bias=not model.disable_bias_linear,
            products=context.products,
            blocks=context.blocks,
            device=device,
        )
        self.transform_norm = build_norm(model, device=device)
        self.sentence = SentenceHead(model, context) if config.bert.has_sentence_head else None

    def forward(self, inputs: tuple[Tensor, ...]) -> Output:
        """Hidden states [b, s, h], document numbers and, where the head computes the loss, what `Scored` holds."""
        hidden, _, *scored = inputs
        x = self.norm(hidden)
        transformed = self.transform_norm(ops.gelu(self.transform(x), exact=True))
        outputs = self._losses(transformed, Scored(*scored)) if scored else (self.logits(transformed),)
        if self.sentence is not None:
            outputs = (*outputs, self.sentence(x))
        return outputs if len(outputs) > 1 else outputs[0]

    def _losses(self, x: Tensor, scored: Scored) -> tuple[Tensor, ...]:
        if self.training:
            return (self.loss.summed(x, self.weight, self.bias, scored, self.loss_options),)
        return self.loss.summed_and_likeliest(x, self.weight, self.bias, scored, ops.CrossEntropyOptions())


class SentenceHead(nn.Module):
    """Two logits for a pair of segments from the hidden state of the first position: next or in order, or not."""

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        h = config.hidden_size
        self.split = context.layer_group if context.sequence_parallel else ALONE
        self.pooler = ReplicatedLinear(h, h, products=context.products, device=context.device)
        self.classifier = ReplicatedLinear(h, 2, products=context.products, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] (or, sequence parallel, [b, s/t, h]) -> [b, 2], the same on every rank of the layer group. Where
        ranks divide sequences, those of the first position count: the task gives the others no label."""
        logits = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        # Sequence parallel, only the first rank has the first position. The others' weights get gradients of zero, and
        # all are summed afterwards, like those of every layer that each rank applies to its positions.
        return reduce_from_group(logits * float(self.split.is_first), self.split) if self.split.size > 1 else logits


def bert_layers(config: ResolvedBertConfig, context: BuildContext) -> list[LayerSpec]:
    """The whole model as layer descriptions; nothing is allocated."""
    first, *blocks, last = bert_outline(config)
    return [
        LayerSpec.of(first, partial(BertEmbedding, config, context)),
        *map(LayerSpec.of, blocks, _builds(config, context)),
        LayerSpec.of(last, partial(BertHead, config, context)),
    ]


def _builds(config: ResolvedBertConfig, context: BuildContext) -> list[Callable[[], nn.Module]]:
    """What makes each block."""
    model, modern = config.model, config.bert.packed
    bases = (model.rotary_base, config.bert.local_rotary_base) if modern else ()
    turns = [Rotary(model.rotary_dimensions, base=base, sequence=context.attended) for base in bases]
    builders: list[Callable[[], nn.Module]] = []
    for i in range(model.num_layers):
        block, name = bert_block(config, i), f"blocks.{i}"
        if modern:
            build: Callable[[], nn.Module] = partial(
                TransformerBlock,
                block,
                context,
                name,
                causal=False,
                window=block.window_size,
                rotary=turns[block.window_size is not None],
                attention_norm=i > 0,  # the first block reads what the embedding has normed already
            )
        else:
            build = partial(PostNormBlock, block, context, name)
        builders.append(build)
    return builders


def bert_flops(config: ResolvedBertConfig) -> float:
    """Forward and backward operations of one sequence, as `flops_per_sequence` counts them for GPT."""
    model, length = config.model, config.data.seq_length
    blocks = sum(block_flops(bert_block(config, i), length) for i in range(model.num_layers))
    return 3.0 * length * (blocks + head_flops(model) + 2.0 * model.hidden_size**2)
