"""Cross-entropy over a vocabulary that is split across tensor-parallel ranks, without ever gathering the logits.

Two small all-reduces per call: the maximum (for stability), then one of two or three floats a token (sum of
exponentials, target's logit and, with label smoothing, the sum of logits); never one of vocabulary size. The method
is that of Shoeybi et al. 2019 (arXiv 1909.08053, section 3); the z-loss is that of PaLM (arXiv 2204.02311, section
5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import split_evenly


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions:
    """What is computed per token.

    Attributes:
        label_smoothing: weight e in [0, 1) of the uniform distribution over the true vocabulary.
        z_loss: weight of log(Z)^2, Z being the softmax denominator; 0 leaves it out.
        ignore_index: targets of this value give loss 0 and gradient 0.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, options: CrossEntropyOptions, group: Group
    ) -> Tensor:
        start, stop = split_evenly(vocab_size, group.rank, group.size)
        own = logits[..., : stop - start].float()
        # A rank without a single true column (vocabulary smaller than the group) contributes the neutral element.
        peak = own.amax(-1) if stop > start else own.new_full(own.shape[:-1], -torch.inf)
        all_reduce_(peak, group, "max")
        shifted = own - peak.unsqueeze(-1)

        ignored = targets == options.ignore_index
        local = targets - start
        elsewhere = ignored | (local < 0) | (local >= stop - start)
        local = local.masked_fill(elsewhere, 0)
        here = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) if stop > start else torch.zeros_like(peak)
        sums = [shifted.sum(-1)] if options.label_smoothing else []
        exponentials = shifted.exp_()
        total, target, *logit_sum = all_reduce_(
            torch.stack([exponentials.sum(-1), here.masked_fill_(elsewhere, 0.0), *sums]), group
        )

        log_total = total.log()
        loss = log_total - target
        if options.label_smoothing:
            loss += options.label_smoothing * (target - logit_sum[0] / vocab_size)
        log_z = log_total + peak
        if options.z_loss:
            loss += options.z_loss * log_z.square()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, elsewhere, ignored, log_z)
        ctx.vocab_size, ctx.options = vocab_size, options
        ctx.padding, ctx.dtype = logits.shape[-1] - (stop - start), logits.dtype
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        softmax, local, elsewhere, ignored, log_z = ctx.saved_tensors
        smoothing, z_loss = ctx.options.label_smoothing, ctx.options.z_loss
        scale = grad_loss.masked_fill(ignored, 0.0).unsqueeze(-1)
        # The product with the scale makes the new tensor; softmax itself stays as saved, for a second backward.
        weight = scale * (1.0 + 2.0 * z_loss * log_z.unsqueeze(-1)) if z_loss else scale
        grad = softmax * weight
        if smoothing:
            grad -= scale * (smoothing / ctx.vocab_size)
        if grad.shape[-1]:
            hit = (scale * (smoothing - 1.0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
            grad.scatter_add_(-1, local.unsqueeze(-1), hit)
        return F.pad(grad, (0, ctx.padding)).to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: Group = ALONE,
    options: CrossEntropyOptions | None = None,
) -> Tensor:
    """Loss per token, in fp32, the same on every rank of the group.

    Args:
        logits: [..., local columns], this rank's share of the vocabulary followed by padding, any float dtype.
        targets: [...] int64, ids in [0, vocab_size) or `options.ignore_index`, the same on every rank.
        vocab_size: the true vocabulary size V; rank r of t owns columns [r V / t, (r + 1) V / t).
        group: the tensor-parallel group.
        options: label smoothing, z-loss, ignore index.

    Returns:
        [...] fp32; `F.cross_entropy(..., reduction="none")` of the gathered, unpadded logits.
    """
    options = options or CrossEntropyOptions()
    if group.size == 1 and options.z_loss == 0.0:
        loss = F.cross_entropy(
            logits[..., :vocab_size].float().flatten(0, -2),
            targets.flatten(),
            reduction="none",
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
        )
        return loss.view(targets.shape)
    return _VocabParallelCrossEntropy.apply(logits, targets, vocab_size, options, group)
