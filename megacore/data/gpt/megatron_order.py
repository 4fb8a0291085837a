"""Megatron-LM's order of samples (`--sample-order megatron`), checked against megatron-core 0.16. All epochs are
shuffled together, documents and windows, except for a last epoch of which less than 80% is used. Random numbers are
those of NumPy's Mersenne Twister. A run of another length has another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megacore.data.gpt.index_cache import Arrays

_SEPARATE_BELOW = 0.80  # of an epoch's samples
_SURPLUS = 0.005  # samples that each dataset of a blend has beyond its share


def build_indices(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    num_samples: int | None,
    seq_length: int,
    seed: int,
) -> Arrays:
    """The arrays of `megacore.data.gpt.dataset.build_indices`; `num_samples`: None: those of one epoch."""
    tokens = int(lengths.sum())
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // seq_length  # windows that end in an epoch before the last
    of_last = (num_samples or 0) - before_last
    separate = epochs > 1 and of_last < int(_SEPARATE_BELOW * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)

    def shuffled(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        random.shuffle(numbers)
        return numbers

    parts = (epochs - 1, 1) if separate else (epochs,)
    order = np.concatenate([shuffled(np.tile(np.arange(len(documents)), count)) for count in parts])
    windows = (epochs * tokens - 1) // seq_length
    edges = (0, before_last, windows) if separate else (0, windows)
    shuffle = np.concatenate([shuffled(np.arange(*edge)) for edge in pairwise(edges)])
    ends = np.cumsum(lengths[order])
    starts = np.arange(windows + 1) * seq_length
    position = np.searchsorted(ends, starts, side="right")  # the document that holds each window's first token
    offset = starts - (ends[position] - lengths[order[position]])
    return {
        "document_index": documents[order],
        "sample_index": np.stack([position, offset], 1).astype(np.int64),
        "shuffle_index": shuffle.astype(np.int64),
    }


def sizes_of_blend(weights: Sequence[float], num_samples: int) -> list[int]:
    """How many samples each dataset of a blend is built with, for positive weights in any unit."""
    return [math.ceil(math.ceil(num_samples * share) * (1 + _SURPLUS)) for share in normalized(weights)]


def blend_order(shares: Sequence[float], num_samples: int) -> NDArray[np.int16]:
    """int16 [num_samples]: the dataset that each sample of a blend comes from, which is furthest behind its share."""
    counts, order = [0] * len(shares), np.empty(num_samples, np.int16)
    for index in range(num_samples):
        reached = max(float(index), 1.0)
        errors = [share * reached - count for share, count in zip(shares, counts, strict=True)]
        order[index] = behind = errors.index(max(errors))
        counts[behind] += 1
    return order


def normalized(weights: Sequence[float]) -> list[float]:
    """The shares of weights."""
    shares = np.array(weights, dtype=np.float64)
    made: list[float] = (shares / np.sum(shares)).tolist()
    return made
