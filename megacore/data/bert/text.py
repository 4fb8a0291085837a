"""A sample of BERT before it is masked, and what the ways of laying one out share: the split that is read, the order
of its units, and the checked reading of tokens. layouts.py has the ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megacore.data.bert.masking import Bools, SpecialTokens
from megacore.data.gpt.index_cache import cached_arrays
from megacore.data.gpt.shuffling import shuffled_epochs
from megacore.data.indexed.reader import IndexedDataset, int64_tokens

_VERSION = 1  # of what is cached: raise it when the same inputs give other indices
NO_LABEL = -1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A sample before masking, without padding.

    Attributes:
        tokens: int64 [n], n at most the sample's length.
        token_types: int64 [n].
        documents: int64 [n].
        begins: bool [n], where a sentence begins; None where nobody asks.
        label: Of the sentence task, -1 without one.
    """

    tokens: NDArray[np.int64]
    token_types: NDArray[np.int64]
    documents: NDArray[np.int64]
    begins: Bools | None
    label: int = NO_LABEL


class BertText(Protocol):
    """Lays out samples."""

    def layout(self, index: int, rng: np.random.Generator) -> Layout:
        """Sample `index`, drawn with the sample's random numbers."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the samples of a run have in common.

    Attributes:
        seq_length: Tokens of a sample, special ones and padding included.
        special: The tokens it is put together with.
        short_seq_prob: Share of the samples that are cut to a random length.
        mark_sentences: Whether a layout says where sentences begin.
        vocab_size: Size of the vocabulary, checked in every sample.
    """

    seq_length: int
    special: SpecialTokens
    short_seq_prob: float
    mark_sentences: bool
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """The part of a dataset that samples are made of, and how many are needed.

    Attributes:
        indexed: The opened .bin/.idx.
        documents: The documents to use.
        num_samples: Samples that will be asked for; epochs are added as needed.
        seed: Seed of the order.
        cache_dir: Directory of the index cache; None keeps the indices in memory.
    """

    indexed: IndexedDataset
    documents: range
    num_samples: int
    seed: int
    cache_dir: Path | None = None

    def order(self, count: int) -> NDArray[np.int64]:
        """Which of `count` units each sample is, epoch after epoch."""
        epochs = max(1, -(-self.num_samples // count))
        description = {"version": _VERSION, "order": [count, epochs], "seed": self.seed, "numpy": _numpy()}
        return cached_arrays(self.cache_dir, description, lambda: {"order": shuffled_epochs(count, epochs, self.seed)})[
            "order"
        ]

    def describe(self) -> dict[str, object]:
        """What every index of this split follows from."""
        fingerprint = self.indexed.fingerprint if self.cache_dir else ""
        return {
            "version": _VERSION,
            "numpy": _numpy(),
            "idx": fingerprint,
            "documents": [self.documents.start, self.documents.stop],
        }


class Reader:
    """Reads tokens of a dataset, checked against the vocabulary, and where sentences begin in them."""

    def __init__(self, indexed: IndexedDataset, vocab_size: int) -> None:
        self.indexed, self._vocab_size = indexed, vocab_size

    def tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        """int64 [stop - start]: tokens `[start, stop)` of the .bin.

        Raises:
            DataError: One of them is outside the vocabulary.
        """
        return int64_tokens(self.indexed, start, stop, self._vocab_size)

    def begins(self, start: int, stop: int) -> Bools:
        """bool [stop - start]: where in those tokens a sequence begins."""
        size, pointers = self.indexed.dtype.itemsize, self.indexed.sequence_pointers
        first, last = np.searchsorted(pointers, (start * size, stop * size))
        marks = np.zeros(stop - start, np.bool_)
        marks[pointers[first:last] // size - start] = True
        return marks


def _numpy() -> str:
    return np.__version__.split(".")[0]
