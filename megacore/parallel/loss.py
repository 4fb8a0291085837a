"""The vocabulary split over tensor-parallel ranks: its cross-entropy, and an output layer that computes it as one
operator, which never holds all logits.

Ranks never gather logits: one exchange per call, of three floats per token (largest logit, sum of exponentials, linear
part). Each rank combines the others' statistics in the same order, so that all get the same bits. What is computed on a
rank is `megacore.ops.cross_entropy`, which a `VocabularyShare` tells what the rank holds.

The output layer computes a rank's share a chunk at a time, forward and once more backward, as if more ranks had split
it: the statistics of the chunks are merged like those of ranks (megacore/ops/loss.py). Only one chunk's logits exist at
any time, over which their gradient is written. Chunks are of the vocabulary and not of the tokens, so that the weight's
gradient is computed once for each of its rows and needs no second sum; only the input's is summed over chunks, in fp32,
to which each chunk's product adds unrounded.

Shape legend: s sequence, b micro-batch, h hidden size, V vocabulary, t tensor-parallel ranks, n tokens (b x s).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacore.ops.loss import (
    CrossEntropyOptions,
    GradientOfLogits,
    SoftmaxSums,
    VocabularyShare,
    losses,
    merged,
    statistics,
)
from megacore.ops.soft_cap import soft_cap_, soft_cap_slope
from megacore.parallel.canonical import ONE_BLOCK, Blocks, aligned, tree_sum
from megacore.parallel.collectives import all_gather, copy_to_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import Products, gradient_sum
from megacore.parallel.sequence import gather_sequence
from megacore.parallel.sharding import split_evenly

_ALIGNED = 64  # columns; a product of fewer is slower
_WIDE = 1024  # columns, from which on rounding up to `_ALIGNED` costs little


# ---- the vocabulary of ranks


def vocabulary_share(vocab_size: int, group: Group = ALONE, blocks: Blocks = ONE_BLOCK) -> VocabularyShare:
    """Which columns of the logits this rank holds, and the exchange.

    Args:
        vocab_size: the true vocabulary size V; rank r of t holds columns [r V / t, (r + 1) V / t).
        group: the tensor-parallel group.
        blocks: that the ranks have statistics of, in place of one set for all their columns.
    """
    if blocks.divide:
        return VocabularyShare(
            bounds=tuple(split_evenly(vocab_size, number, blocks.count) for number in range(blocks.count)),
            exchange=blocks.of_all_blocks,
        )
    if group.size == 1:
        return VocabularyShare(((0, vocab_size),))
    return VocabularyShare(
        bounds=tuple(split_evenly(vocab_size, rank, group.size) for rank in range(group.size)),
        rank=group.rank,
        exchange=partial(all_gather, group=group),
    )


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, share: VocabularyShare) -> Tensor:
    """The likeliest token at each position, the same on every rank.

    Args:
        logits: [..., local columns], this rank's share of the vocabulary followed by padding, any float dtype.
        share: which columns these are.

    Returns:
        [...] int64, ids in [0, share.vocab_size).
    """
    values, columns = logits[..., : share.columns].float().max(dim=-1)
    return likeliest_of_ranks(values, columns + share.start, share)


def likeliest_of_ranks(values: Tensor, ids: Tensor, share: VocabularyShare) -> Tensor:
    """The likeliest token of the whole vocabulary, from that of each rank.

    Args:
        values: [...] the largest logit of this rank's columns.
        ids: [...] whose it is.
        share: which columns these are.

    Returns:
        [...] int64, the same on every rank.
    """
    candidates = share.exchange(torch.stack([values.double(), ids.double()]))  # [t, 2, ...]
    best = candidates[:, 0].argmax(dim=0, keepdim=True)
    return candidates[:, 1].gather(0, best).squeeze(0).long()


# ---- the loss of an output layer


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """How an output layer's loss is computed.

    Attributes:
        vocab_size: V, the true vocabulary size.
        chunks: of a rank's columns. A chunk is rounded up to a multiple of 64 columns, so that there may be fewer.
        group: the tensor-parallel group.
        sequence_parallel: the input is split along the sequence.
        split_backward: the gradients of input and weight are computed apart, each with the logits it needs.
        products: computes the matrix products.
        blocks: of the vocabulary, each of which is a chunk whatever `chunks` says, so that no layout changes a bit.
        soft_cap: of the logits; None: they have none.
    """

    vocab_size: int
    chunks: int
    group: Group
    sequence_parallel: bool
    split_backward: bool
    products: Products
    blocks: Blocks = ONE_BLOCK
    soft_cap: float | None = None

    @property
    def in_parts(self) -> bool:
        """Whether the loss is computed a part of the vocabulary at a time, without all logits."""
        return self.chunks > 1 or self.blocks.divide

    def losses(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: CrossEntropyOptions
    ) -> Tensor:
        """Loss per token, the same on every rank of the group.

        Args:
            x: [b, s, h], or, sequence parallel, [b, s/t, h]; with blocks those of this rank's positions.
            weight: [padded V/t, h]
            bias: [padded V/t], or None.
            targets: [b, s] int64, ids in [0, V) or `options.ignore_index`; with blocks of whole sequences.
            options: label smoothing, z-loss, ignore index.

        Returns:
            [b, s] fp32; what `ops.cross_entropy` gives for the logits, to fp32 rounding.
        """
        x = self._entered(x)
        setting = _Setting(self, self._share(), options)
        with torch.no_grad():
            made = setting.forward(x, weight, bias, targets, likeliest=False)
        loss, sums = made.loss.view(targets.shape), made.sums
        if not torch.is_grad_enabled():
            return loss
        if not (self.split_backward and weight.requires_grad):
            whole: Tensor = _Gradients.apply(setting, sums, loss, x, weight, bias)
            return whole
        fixed = None if bias is None else bias.detach()
        of_input = _Gradients.apply(setting, sums, loss, x, weight.detach(), fixed)
        zeros = loss.new_zeros(()).expand(loss.shape)
        return of_input + _Gradients.apply(setting, sums, zeros, x.detach(), weight, bias)

    @torch.no_grad()
    def losses_and_likeliest(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: CrossEntropyOptions
    ) -> tuple[Tensor, Tensor]:
        """`losses`, and the likeliest token at each position, [b, s] int64; for an evaluation."""
        setting = _Setting(self, self._share(), options)
        made = setting.forward(self._entered(x), weight, bias, targets, likeliest=True)
        share = vocabulary_share(self.vocab_size, self.group)
        if self.blocks.divide:
            share = replace(share, exchange=lambda of_rank: self.blocks.of_all_blocks(of_rank[None]))
        likeliest = likeliest_of_ranks(*made.likeliest, share)
        return made.loss.view(targets.shape), likeliest.view(targets.shape)

    def _entered(self, x: Tensor) -> Tensor:
        """All of the input, [b, s, h]."""
        if self.blocks.divide:
            return self.blocks.entered(x)
        if self.group.size == 1:
            return x
        return gather_sequence(x, self.group) if self.sequence_parallel else copy_to_group(x, self.group, in_place=True)

    def _share(self) -> VocabularyShare:
        return vocabulary_share(self.vocab_size, self.group, self.blocks)


@dataclass(frozen=True)
class _Setting:
    """What the forward and the backward of one call have in common."""

    layer: ChunkedLoss
    share: VocabularyShare
    options: CrossEntropyOptions

    def parts(self, weight: Tensor, bias: Tensor | None) -> Iterator[_Part]:
        """The chunks of a rank's rows; the last one includes the padding, which a rank without columns has at
        least one row of."""
        if self.layer.blocks.divide:
            yield from self._blocks(weight, bias)
            return
        columns, rows = self.share.columns, weight.shape[0]
        height = -(-columns // self.layer.chunks) or rows
        if height >= _WIDE:
            height = -(-height // _ALIGNED) * _ALIGNED
        for start in range(0, max(columns, 1), height):
            stop = start + height if start + height < columns else rows
            here = slice(start, stop)
            yield _Part(
                rows=here,
                weight=weight[here],
                bias=None if bias is None else bias[here],
                first=self.share.start + start,
                columns=min(height, columns - start),
            )

    def _blocks(self, weight: Tensor, bias: Tensor | None) -> Iterator[_Part]:
        """The blocks of a rank's rows, without the padding, which differs between layouts."""
        vocab_size, group = self.share.vocab_size, self.layer.group
        first, _ = split_evenly(vocab_size, group.rank, group.size)
        for start, stop in self.layer.blocks.bounds(vocab_size):
            here = slice(start - first, stop - first)
            yield _Part(
                rows=here,
                weight=aligned(weight[here]),
                bias=None if bias is None else aligned(bias[here]),
                first=start,
                columns=stop - start,
            )

    def logits(self, tokens: Tensor, part: _Part) -> Tensor:
        """Those of a chunk, [n, rows of the chunk]."""
        logits = self.layer.products.output(tokens, part.weight, part.bias)
        return logits if self.layer.soft_cap is None else soft_cap_(logits, self.layer.soft_cap)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, likeliest: bool) -> _Forward:
        """The losses, and if wanted the likeliest tokens."""
        tokens, ids = x.flatten(0, -2).to(weight.dtype), targets.contiguous().view(-1)
        partial_sums, bounds = [], []
        best = tokens.new_full((len(ids),), -torch.inf, dtype=torch.float32), ids
        for part in self.parts(weight, bias):
            logits = self.logits(tokens, part)
            columns = {"start": part.first, "columns": part.columns}
            partial_sums.append(statistics(logits, ids, share=self.share, options=self.options, **columns))
            bounds.append((part.first, part.first + part.columns))
            if likeliest and part.columns:
                best = _better(best, logits[:, : part.columns].float().max(-1), part.first)
            del logits
        vocab_size = self.share.vocab_size
        local = torch.stack(partial_sums)
        if not self.layer.blocks.divide:  # the exchange merges those of all blocks
            local = merged(local, ids, bounds=bounds, vocab_size=vocab_size, options=self.options)
        loss, sums = losses(local, ids, share=self.share, options=self.options)
        return _Forward(loss, sums, best)


class _Forward(NamedTuple):
    """What a forward computes for n tokens.

    Attributes:
        loss: per token, [n] fp32.
        sums: what backward needs.
        likeliest: this rank's largest logit of each token and its id, [n] each; only computed if wanted.
    """

    loss: Tensor
    sums: SoftmaxSums
    likeliest: tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A chunk: its rows of the weight, padding included, and their token ids."""

    rows: slice
    weight: Tensor
    bias: Tensor | None
    first: int
    columns: int


def _better(best: tuple[Tensor, Tensor], largest: Any, first: int) -> tuple[Tensor, Tensor]:
    """The larger of two logits and its id, the earlier one where both are equal."""
    later = largest.values > best[0]
    return torch.where(later, largest.values, best[0]), torch.where(later, largest.indices + first, best[1])


class _Gradients(torch.autograd.Function):
    """Passes the loss through; backward computes the logits again, and the gradients of those of input, weight and bias
    that need one."""

    @staticmethod
    def forward(
        ctx: Any, setting: _Setting, sums: SoftmaxSums, loss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, sums.targets, sums.peak, sums.total, sums.log_z)
        ctx.setting, ctx.sum = setting, gradient_sum(weight)
        return loss.view_as(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *sums = ctx.saved_tensors
        setting: _Setting = ctx.setting
        products, tokens = setting.layer.products, x.flatten(0, -2).to(weight.dtype)
        soft_cap = setting.layer.soft_cap
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[3:]
        gradient_of = GradientOfLogits(grad_loss, SoftmaxSums(*sums), share=setting.share, options=setting.options)
        blocks = setting.layer.blocks
        grad_x = torch.zeros_like(tokens, dtype=torch.float32) if wants_x and not blocks.divide else None
        terms = list[Tensor]()
        added = ctx.sum if wants_weight else None
        total, has_terms = (None, False) if added is None else added.buffer()
        empty = torch.zeros_like if blocks.divide else torch.empty_like  # blocks leave the padding out
        grad_weight = empty(weight) if wants_weight and total is None else None
        grad_bias = empty(bias) if wants_bias else None
        for part in setting.parts(weight, bias):
            logits = setting.logits(tokens, part)
            slope = None if soft_cap is None else soft_cap_slope(logits, soft_cap)
            gradient_of.write_(logits, start=part.first, columns=part.columns)
            if slope is not None:
                logits.mul_(slope)
            if grad_x is not None:
                products.add_input_gradient(grad_x, logits, part.weight)
            elif wants_x:
                terms.append(products.input_gradient(logits, part.weight).float())
            if grad_weight is not None:
                grad_weight[part.rows] = products.weight_gradient(logits, tokens)
            if total is not None:
                products.add_weight_gradient(total[part.rows], logits, tokens, has_terms=has_terms)
            if grad_bias is not None:
                grad_bias[part.rows] = logits.sum(0)
            del logits, slope
        if added is not None:
            added.added()
        if terms:
            grad_x = tree_sum(terms)
        grad_x = None if grad_x is None else grad_x.to(x.dtype).view(x.shape)
        return None, None, None, grad_x, grad_weight, grad_bias
