"""The vocabulary split across tensor-parallel ranks: its cross-entropy, and the likeliest token, without ever gathering
the logits.

One exchange per call, of three floats per token (largest logit, sum of exponentials, linear part), never of vocabulary
size: each rank combines the others' statistics in the same order, so that all get the same bits. What is computed on a
rank is `megacore.ops.cross_entropy`, which a `VocabularyShare` tells what the rank holds.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megacore.ops import VocabularyShare
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.collectives import all_gather
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import split_evenly


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
