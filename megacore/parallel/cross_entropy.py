"""Cross-entropy, and the likeliest token, over a vocabulary that is split across tensor-parallel ranks, without ever
gathering the logits.

One exchange a call, of three floats a token (largest logit, sum of exponentials, linear part), never of vocabulary
size: each rank combines the others' statistics in the same order, so that all get the same bits. What is computed on a
rank is `megacore.ops.loss`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megacore.ops import CrossEntropyOptions, VocabularyShare, cross_entropy
from megacore.parallel.collectives import all_gather
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import split_evenly

__all__ = [
    "CrossEntropyOptions",
    "likeliest_of_group",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocabulary_share",
]


def vocabulary_share(vocab_size: int, group: Group) -> VocabularyShare:
    """Which columns of the logits this rank holds, rank r of t [r V / t, (r + 1) V / t), and the exchange."""
    return VocabularyShare(
        bounds=tuple(split_evenly(vocab_size, rank, group.size) for rank in range(group.size)),
        rank=group.rank,
        exchange=partial(all_gather, group=group),
    )


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
        options: label smoothing, z-loss, ignore index, in-place gradient.

    Returns:
        [...] fp32; `F.cross_entropy(..., reduction="none")` of the gathered, unpadded logits.
    """
    return cross_entropy(logits, targets, options=options, share=vocabulary_share(vocab_size, group))


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, *, vocab_size: int, group: Group = ALONE) -> Tensor:
    """The likeliest token at each position, the same on every rank of the group.

    Args:
        logits: [..., local columns], as for `vocab_parallel_cross_entropy`.
        vocab_size: the true vocabulary size.
        group: the tensor-parallel group.

    Returns:
        [...] int64, ids in [0, vocab_size).
    """
    start, stop = split_evenly(vocab_size, group.rank, group.size)
    values, places = logits[..., : stop - start].float().max(dim=-1)
    return likeliest_of_group(values, places + start, group)


def likeliest_of_group(values: Tensor, ids: Tensor, group: Group) -> Tensor:
    """The likeliest token of the whole vocabulary, from that of each rank.

    Args:
        values: [...] the largest logit of this rank's columns.
        ids: [...] whose it is.
        group: the tensor-parallel group.

    Returns:
        [...] int64, the same on every rank.
    """
    found = all_gather(torch.stack([values.double(), ids.double()]), group)  # [t, 2, ...]
    best = found[:, 0].argmax(dim=0, keepdim=True)
    return found[:, 1].gather(0, best).squeeze(0).long()
