"""The vocabulary split over tensor-parallel ranks: its cross-entropy, and an output layer that computes it as one
operator, which never holds all logits.

Ranks never gather logits: one exchange per call, of three floats per token (largest logit, sum of exponentials, linear
part). Each rank combines the others' statistics in the same order, so that all get the same bits. What is computed on a
rank is `megacore.ops.cross_entropy`, which a `VocabularyShare` tells what the rank holds.

The output layer takes a chunk of the tokens at a time, and computes its logits once: the loss, then the gradient of the
logits, which is written over them, and from that in forward already the gradients of input, weight and bias. Backward
only hands these on, so that there are three products and never all logits. The method is that of the Liger kernels (Hsu
et al. 2024, arXiv 2410.10989, section 3.2). It asks for the factor of the loss before backward: 16-bit gradients then
have the range that the loss scale gives them. The weight's gradient is summed over chunks in fp32.

Shape legend: s sequence, b micro-batch, h hidden size, V vocabulary, t tensor-parallel ranks, n tokens (b x s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    statistics,
)
from megacore.ops.soft_cap import soft_cap_, soft_cap_slope
from megacore.parallel.canonical import ONE_BLOCK, Blocks, aligned, tree_sum
from megacore.parallel.collectives import all_gather, copy_to_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import Products, accumulator_of, adds_in_fp32
from megacore.parallel.sequence import gather_sequence
from megacore.parallel.sharding import split_evenly

_ALIGNED = 64  # tokens; a product of other numbers is slower
_LONG = 1024  # tokens, from which on rounding up to `_ALIGNED` costs little


# ---- the vocabulary of ranks


def vocabulary_share(vocab_size: int, group: Group = ALONE, blocks: Blocks = ONE_BLOCK) -> VocabularyShare:
    """Which columns of the logits this rank holds, and the exchange. `vocab_size`: the true vocabulary size V; rank r
    of t holds columns [r V / t, (r + 1) V / t). `blocks`: that the ranks have statistics of, in place of one set for
    all their columns."""
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
    """The likeliest token at each position, the same on every rank. `logits`: [..., local columns], this rank's share
    of the vocabulary followed by padding, any float dtype. Returns [...] int64, ids in [0, share.vocab_size)."""
    values, columns = logits[..., : share.columns].float().max(dim=-1)
    return likeliest_of_ranks(values, columns + share.start, share)


def likeliest_of_ranks(values: Tensor, ids: Tensor, share: VocabularyShare) -> Tensor:
    """The likeliest token of the whole vocabulary, from that of each rank. `values`: [...] the largest logit of this
    rank's columns. `ids`: [...] whose it is. Returns [...] int64, the same on every rank."""
    candidates = share.exchange(torch.stack([values.double(), ids.double()]))  # [t, 2, ...]
    best = candidates[:, 0].argmax(dim=0, keepdim=True)
    return candidates[:, 1].gather(0, best).squeeze(0).long()


# ---- the loss of an output layer


class Scored(NamedTuple):
    """What an output layer is to predict, and what the loss of that is multiplied by."""

    targets: Tensor  # [b, s] int64, ids in [0, V) or `CrossEntropyOptions.ignore_index`
    mask: Tensor  # [b, s], the weight of each token's loss in the sum
    # The gradient of that sum which backward will begin with, fp32 of one element or more, the first of which counts.
    # Another one in backward is as exact, up to the range of 16-bit numbers.
    factor: Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """How an output layer's loss is computed."""

    vocab_size: int  # V, the true vocabulary size
    chunks: int  # of the tokens. A chunk is rounded up to a multiple of 64 tokens, so that there may be fewer.
    group: Group  # the tensor-parallel group
    sequence_parallel: bool  # the input is split along the sequence
    products: Products  # computes the matrix products
    # Of the vocabulary, each of which is computed by itself, so that no layout changes a bit.
    blocks: Blocks = ONE_BLOCK
    soft_cap: float | None = None  # of the logits; None: they have none

    @property
    def in_parts(self) -> bool:
        """Whether the output layer computes the loss, a part of the tokens or of the vocabulary at a time."""
        return self.chunks > 1 or self.blocks.divide

    def summed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scored: Scored, options: CrossEntropyOptions
    ) -> Tensor:
        """The loss summed over tokens, the same on every rank of the group. Returns scalar fp32; the masked sum of what
        `ops.cross_entropy` gives for the logits, to fp32 rounding.

        Args:
            x: [b, s, h], or, sequence parallel, [b, s/t, h]; with blocks those of this rank's positions.
            weight: [padded V/t, h]
            bias: [padded V/t], or None.
            scored: with blocks of whole sequences.
            options: label smoothing, z-loss, ignore index.
        """
        x = self._entered(x)
        learns = torch.is_grad_enabled()
        wanted = tuple(learns and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
        with torch.no_grad():
            run = _Pass(self, x, weight, bias, scored, options)
            gradients = _Gradients(run, wanted) if any(wanted) else None
            loss = run.losses(run.loss_of if gradients is None else gradients.add)
            total = torch.sum(loss.view(scored.targets.shape) * scored.mask)
        if gradients is None:
            return total
        # A schedule that splits backward asks for the gradient of the input or for the others: each has a node.
        of_input, *of_parameters = gradients.known
        known: Tensor = _Known.apply(total, run.factor, [of_input], x) if wanted[0] else total
        if any(wanted[1:]):
            zero = torch.zeros_like(total)
            known = known + _Known.apply(zero, run.factor, of_parameters, weight, bias)
        return known

    @torch.no_grad()
    def summed_and_likeliest(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scored: Scored, options: CrossEntropyOptions
    ) -> tuple[Tensor, Tensor]:
        """`summed`, and the likeliest token at each position, [b, s] int64; for an evaluation."""
        run = _Pass(self, self._entered(x), weight, bias, scored, options)
        values = torch.empty(run.ids.shape, device=x.device)
        ids = torch.empty_like(run.ids)
        loss = run.losses(partial(run.loss_and_likeliest_of, values, ids)).view(scored.targets.shape)
        share = vocabulary_share(self.vocab_size, self.group)
        if self.blocks.divide:
            share = replace(share, exchange=lambda of_rank: self.blocks.of_all_blocks(of_rank[None]))
        return torch.sum(loss * scored.mask), likeliest_of_ranks(values, ids, share).view(loss.shape)

    def _entered(self, x: Tensor) -> Tensor:
        if self.blocks.divide:
            return self.blocks.entered(x)
        if self.group.size == 1:
            return x
        return gather_sequence(x, self.group) if self.sequence_parallel else copy_to_group(x, self.group, in_place=True)


class _Pass:
    """One call: its operands, and the loss of one chunk of the tokens."""

    def __init__(
        self, layer: ChunkedLoss, x: Tensor, weight: Tensor, bias: Tensor | None, scored: Scored,
        options: CrossEntropyOptions,
    ) -> None:  # fmt: skip
        self.layer, self.options, self.weight, self.bias = layer, options, weight.detach(), bias
        self.share = vocabulary_share(layer.vocab_size, layer.group, layer.blocks)
        # `ids`: the targets, [n].
        # `x`: the input, [n, h].
        self.x, self.ids = x.detach().flatten(0, -2), scored.targets.contiguous().view(-1)
        factor = scored.factor.flatten()[0].float()
        self.factor = torch.where(factor == 0.0, 1.0, factor)  # of them, fp32 scalar, not 0
        # The gradients of the tokens' losses, [n] fp32.
        self.token_weights = scored.mask.reshape(-1).float() * self.factor
        self.parts = list(self._parts())  # of a rank's rows of the weight: all of them, or with blocks those of each
        tokens = len(self.ids)
        height = -(-tokens // layer.chunks)
        self.height = height if height < _LONG else -(-height // _ALIGNED) * _ALIGNED  # of a chunk, in tokens

    def _parts(self) -> Iterator[_Part]:
        """All rows of the weight, padding included; or each block's, without the padding, which differs between
        layouts."""
        blocks, share, weight, bias = self.layer.blocks, self.share, self.weight, self.bias
        if not blocks.divide:
            yield _Part(slice(0, len(weight)), weight, bias, share.start, share.columns)
            return
        first, _ = split_evenly(share.vocab_size, self.layer.group.rank, self.layer.group.size)
        for start, stop in blocks.bounds(share.vocab_size):
            here = slice(start - first, stop - first)
            shift = None if bias is None else aligned(bias[here])
            yield _Part(here, aligned(weight[here]), shift, start, stop - start)

    def losses(self, loss_of: Callable[[slice], Tensor]) -> Tensor:
        """The loss of each token, [n] fp32, by a function of a chunk's tokens."""
        loss = torch.empty(len(self.ids), device=self.x.device)
        for start in range(0, len(self.ids), self.height):
            rows = slice(start, start + self.height)
            loss[rows] = loss_of(rows)
        return loss

    def tokens(self, rows: slice) -> Tensor:
        """Those rows of the input, in the dtype of the weight."""
        return aligned(self.x[rows].to(self.weight.dtype))

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Of a chunk, [n, rows] for each part."""
        layer = self.layer
        logits = [layer.products.output(tokens, part.weight, part.bias) for part in self.parts]
        return logits if layer.soft_cap is None else [soft_cap_(each, layer.soft_cap) for each in logits]

    def loss_and_sums(self, logits: list[Tensor], rows: slice) -> tuple[Tensor, SoftmaxSums]:
        """The losses of a chunk from its logits, and what their gradient needs."""
        ids, share, options = self.ids[rows], self.share, self.options
        local = [
            statistics(each, ids, share=share, start=part.first, columns=part.columns, options=options)
            for each, part in zip(logits, self.parts, strict=True)
        ]
        return losses(torch.stack(local) if self.layer.blocks.divide else local[0], ids, share=share, options=options)

    def loss_of(self, rows: slice) -> Tensor:
        return self.loss_and_sums(self.logits(self.tokens(rows)), rows)[0]

    def loss_and_likeliest_of(self, values: Tensor, ids: Tensor, rows: slice) -> Tensor:
        """The losses of a chunk; its largest logits on this rank, and their ids, are written to `values` and `ids`."""
        logits = self.logits(self.tokens(rows))
        best = values[rows].fill_(-torch.inf), ids[rows].zero_()
        for each, part in zip(logits, self.parts, strict=True):
            if part.columns:
                best = _better(best, each[:, : part.columns].float().max(-1), part.first)
        values[rows], ids[rows] = best
        return self.loss_and_sums(logits, rows)[0]


class _Part(NamedTuple):
    """Rows of the weight that one product reads, padding included, and their token ids."""

    rows: slice
    weight: Tensor
    bias: Tensor | None
    first: int
    columns: int


def _better(best: tuple[Tensor, Tensor], largest: Any, first: int) -> tuple[Tensor, Tensor]:
    """The larger of two logits and its id, the earlier one where both are equal."""
    later = largest.values > best[0]
    return torch.where(later, largest.values, best[0]), torch.where(later, largest.indices + first, best[1])


class _Gradients:
    """The gradients of an output layer, to which every chunk adds. `wanted`: of input, weight, bias."""

    def __init__(self, run: _Pass, wanted: Sequence[bool]) -> None:
        self.run = run
        own, device = run.weight.dtype, run.x.device
        summed = torch.promote_types(own, torch.float32) if run.height < len(run.x) else own
        self._multiplied = own if adds_in_fp32(device, own) else summed  # the dtype of the weight gradient's factors
        make = torch.zeros_like if run.layer.blocks.divide else torch.empty_like  # blocks leave the padding out
        likes = (run.x, run.x.dtype), (run.weight, summed), (run.bias, summed)
        # Those of input, weight and bias; None: not wanted. With several chunks the last two are sums in fp32.
        self.known = [
            make(like, dtype=dtype) if needs and like is not None else None
            for (like, dtype), needs in zip(likes, wanted, strict=True)
        ]

    def add(self, rows: slice) -> Tensor:
        run, layer, has_terms = self.run, self.run.layer, rows.start > 0
        of_input, of_weight, of_bias = self.known
        tokens = run.tokens(rows)
        logits = run.logits(tokens)
        loss, sums = run.loss_and_sums(logits, rows)
        gradient_of = GradientOfLogits(run.token_weights[rows], sums, share=run.share, options=run.options)
        terms = []
        for part, grad in zip(run.parts, logits, strict=True):
            slope = None if layer.soft_cap is None else soft_cap_slope(grad, layer.soft_cap)
            gradient_of.write_(grad, start=part.first, columns=part.columns)
            if slope is not None:
                grad.mul_(slope)
            if of_input is not None:
                term = layer.products.input_gradient(grad, part.weight)
                terms.append(term.float() if layer.blocks.divide else term)
            if of_weight is not None:
                total, factors = of_weight[part.rows], (grad.to(self._multiplied), tokens.to(self._multiplied))
                layer.products.add_weight_gradient(total, *factors, has_terms=has_terms)
            if of_bias is not None:
                of_bias[part.rows] = grad.sum(0) + of_bias[part.rows] if has_terms else grad.sum(0)
        if of_input is not None:
            of_input[rows] = tree_sum(terms)
        return loss


class _Known(torch.autograd.Function):
    """The loss as it is, whose gradients are known for the factor that was expected. Backward hands them on, times the
    factor that comes over the expected one: 1, but for a caller who does more with the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, expected: Tensor, known: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.expected, ctx.known, ctx.accumulators = expected, known, list(map(accumulator_of, inputs))
        ctx.likes = [None if each is None else (each.shape, each.dtype) for each in inputs]
        return loss.view_as(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.known:
            raise RuntimeError("the loss of an output layer has one backward: its gradients were computed in forward")
        factor, given = grad / ctx.expected, list[Tensor | None]()
        for total, like in zip(ctx.accumulators, ctx.likes, strict=True):
            gradient = ctx.known.pop(0)  # whose memory is free once it is handed on
            if gradient is None:
                given.append(None)
            elif total is None:
                shape, dtype = like
                given.append(gradient.mul_(factor).view(shape).to(dtype))
            else:
                buffer, has_terms = total.buffer()
                if has_terms:
                    torch.addcmul(buffer, gradient, factor, out=buffer)
                else:
                    torch.mul(gradient, factor, out=buffer)
                total.added()
                given.append(None)
        return None, None, None, *given
