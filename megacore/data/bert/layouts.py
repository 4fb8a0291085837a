"""The ways to lay out text for BERT: sentence pairs, single segments, or packed documents.

Each class lays out sample k of a split, given the sample's random numbers. What the order of samples follows from is
computed once and cached, as for GPT: epochs follow each other, each in a different order.

- Pairs: a document's sentences are gathered until they fill a sample; such a chunk is cut at a random sentence into A
  and B. Where B is to be another document's text, it begins at a random sentence of another chunk, and what followed A
  waits for its next epoch.
- Segments: a document is cut into pieces of a sample's length.
- Packed: the stream of [CLS] document [SEP] is cut into samples that are full to the last token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megacore.data.bert.chunks import sentence_chunks
from megacore.data.bert.masking import Bools
from megacore.data.bert.text import Layout, Reader, Shape, Split
from megacore.data.gpt.dataset import build_indices, extent
from megacore.data.gpt.index_cache import Arrays, cached_arrays
from megacore.errors import DataError


class PairText:
    """Pairs of segments, [CLS] A [SEP] B [SEP]. The second may be another document's, or the two may be swapped.

    Args:
        split: What to read.
        shape: Of the samples.
        swap: Whether a pair that is not in order is swapped (sop) rather than torn (nsp).

    Raises:
        DataError: No document has two sentences, or, for nsp, only one has.
    """

    def __init__(self, split: Split, shape: Shape, *, swap: bool) -> None:
        self._shape, self._swap = shape, swap
        self._room = shape.seq_length - 3
        self._indexed, self._reader = split.indexed, Reader(split.indexed, shape.vocab_size)
        self._chunks = _pair_chunks(split, self._room)
        _check_chunks(self._chunks, split, swap=swap)
        self._order = split.order(len(self._chunks["first"]))

    def layout(self, index: int, rng: np.random.Generator) -> Layout:
        """Sample `index`, drawn with the sample's random numbers."""
        chunk = int(self._order[index])
        bounds, room = self._sentences(chunk, rng)
        cut = int(bounds[rng.integers(1, len(bounds) - 1)])
        a, b = (int(bounds[0]), cut), (cut, int(bounds[-1]))
        label = int(rng.random() < 0.5)
        if label and self._swap:
            a, b = b, a
        elif label:
            b = self._elsewhere(chunk, max(room - (a[1] - a[0]), 1), rng)
        a, b = truncated(a, b, room, rng)
        special = self._shape.special
        one, two = self._reader.tokens(*a), self._reader.tokens(*b)
        tokens = np.concatenate(([special.cls], one, [special.sep], two, [special.sep]))
        types = np.zeros(len(tokens), np.int64)
        types[len(one) + 2 :] = 1
        begins = None
        if self._shape.mark_sentences:
            gap = [False]
            begins = np.concatenate((gap, self._reader.begins(*a), gap, self._reader.begins(*b), gap))
        return Layout(
            tokens=tokens, token_types=types, documents=np.ones(len(tokens), np.int64), begins=begins, label=label
        )

    def documents_of(self, index: int) -> str:
        """The document of sample `index`; a second segment may be another document's."""
        return f"document {int(self._chunks['document'][int(self._order[index])])} of {self._indexed.prefix}"

    def _sentences(self, chunk: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], int]:
        """Token offsets where the sentences of a sample begin and the last one ends, and the room for their tokens."""
        first, stop = int(self._chunks["first"][chunk]), int(self._chunks["stop"][chunk])
        bounds = self._bounds(first, stop)
        if rng.random() >= self._shape.short_seq_prob:
            return bounds, self._room
        room = int(rng.integers(2, self._room + 1))
        last = int(np.searchsorted(bounds, bounds[-1] - room, side="right")) - 1  # from which on there is enough
        start = int(rng.integers(min(max(last, 0), len(bounds) - 3) + 1))
        end = max(int(np.searchsorted(bounds, bounds[start] + room)), start + 2)
        return bounds[start : end + 1], room

    def _bounds(self, first: int, stop: int) -> NDArray[np.int64]:
        """int64 [n + 1]: token offsets where the n sentences that hold tokens begin, then where the last one ends."""
        lengths = self._indexed.sequence_lengths[first:stop].astype(np.int64)
        begin = int(self._indexed.sequence_pointers[first]) // self._indexed.dtype.itemsize
        return np.concatenate(([begin], begin + np.cumsum(lengths[lengths > 0])))

    def _elsewhere(self, chunk: int, wanted: int, rng: np.random.Generator) -> tuple[int, int]:
        """Whole sentences of another document, with this number of tokens or a little more."""
        documents = self._chunks["document"]
        low, high = np.searchsorted(documents, documents[chunk] + np.arange(2)).tolist()
        other = int(rng.integers(len(documents) - (high - low)))
        other += high - low if other >= low else 0
        first, stop = int(self._chunks["first"][other]), int(self._chunks["stop"][other])
        lengths = self._indexed.sequence_lengths[first:stop]
        real = np.flatnonzero(lengths)
        start = first + int(real[rng.integers(len(real))])
        document_stop = int(self._indexed.document_indices[documents[other] + 1])
        bounds = self._bounds(start, min(start + wanted, document_stop))
        end = min(int(np.searchsorted(bounds, bounds[0] + wanted)), len(bounds) - 1)
        return int(bounds[0]), int(bounds[end])


class SegmentText:
    """Single segments, [CLS] A [SEP]: pieces of a document; the last one may be short.

    Args:
        split: What to read.
        shape: Of the samples.

    Raises:
        DataError: The documents hold no tokens.
    """

    def __init__(self, split: Split, shape: Shape) -> None:
        self._shape, self._room = shape, shape.seq_length - 2
        self._reader, self._first = Reader(split.indexed, shape.vocab_size), split.documents.start
        self._offsets = split.indexed.document_offsets(split.documents.start, split.documents.stop)
        lengths = np.diff(self._offsets)
        _require_tokens(lengths, split)
        self._pieces = np.cumsum(-(-lengths // self._room))  # of each document and those before it
        self._order = split.order(int(self._pieces[-1]))

    def layout(self, index: int, rng: np.random.Generator) -> Layout:
        """Sample `index`, drawn with the sample's random numbers."""
        piece = int(self._order[index])
        document = int(np.searchsorted(self._pieces, piece, side="right"))
        before = int(self._pieces[document - 1]) if document else 0
        start = int(self._offsets[document]) + (piece - before) * self._room
        stop = min(start + self._room, int(self._offsets[document + 1]))
        if rng.random() < self._shape.short_seq_prob:
            length = min(int(rng.integers(1, self._room + 1)), stop - start)
            start += int(rng.integers(stop - start - length + 1))
            stop = start + length
        special = self._shape.special
        tokens = np.concatenate(([special.cls], self._reader.tokens(start, stop), [special.sep]))
        begins = None
        if self._shape.mark_sentences:
            begins = np.concatenate(([False], self._reader.begins(start, stop), [False]))
        zeros = np.zeros(len(tokens), np.int64)
        return Layout(tokens=tokens, token_types=zeros, documents=zeros + 1, begins=begins)

    def documents_of(self, index: int) -> str:
        """The document of sample `index`."""
        document = int(np.searchsorted(self._pieces, int(self._order[index]), side="right"))
        return f"document {self._first + document} of {self._reader.indexed.prefix}"


class PackedText:
    """Documents one after the other, [CLS] A [SEP] [CLS] B [SEP] ..., without padding; one that does not fit continues
    in another sample.

    Args:
        split: What to read.
        shape: Of the samples.

    Raises:
        DataError: The documents hold no tokens.
    """

    def __init__(self, split: Split, shape: Shape) -> None:
        self._shape = shape
        self._reader = Reader(split.indexed, shape.vocab_size)
        lengths = np.diff(split.indexed.document_offsets(split.documents.start, split.documents.stop))
        _require_tokens(lengths, split)
        kept = np.flatnonzero(lengths)
        units = lengths[kept] + 2
        numbers = kept + split.documents.start
        size = extent(int(units.sum()), split.num_samples, shape.seq_length)
        description = {
            **split.describe(),
            "packed": [shape.seq_length, size.epochs, size.windows, size.passes],
            "seed": split.seed,
        }
        self._arrays = cached_arrays(
            split.cache_dir,
            description,
            lambda: build_indices(
                numbers, units, num_samples=split.num_samples, seq_length=shape.seq_length, seed=split.seed
            ),
        )

    def layout(self, index: int, rng: np.random.Generator) -> Layout:
        """Sample `index`; no random numbers are needed."""
        window = int(self._arrays["shuffle_index"][index])
        position, offset = self._arrays["sample_index"][window].tolist()
        length = self._shape.seq_length
        tokens, documents = np.empty(length, np.int64), np.empty(length, np.int64)
        begins = np.zeros(length, np.bool_)
        filled = number = 0
        while filled < length:
            number += 1
            document = int(self._arrays["document_index"][position])
            size = self._fill(tokens[filled:], begins[filled:], document, offset)
            documents[filled : filled + size] = number
            filled, position, offset = filled + size, position + 1, 0
        return Layout(
            tokens=tokens,
            token_types=np.zeros(length, np.int64),
            documents=documents,
            begins=begins if self._shape.mark_sentences else None,
        )

    def _fill(self, tokens: NDArray[np.int64], begins: Bools, document: int, offset: int) -> int:
        """Write [CLS], a document, [SEP] from `offset` on, as far as there is room; returns how much that was."""
        indexed, special = self._reader.indexed, self._shape.special
        begin, end = indexed.document_start(document), indexed.document_start(document + 1)
        stop = min(end - begin + 2, offset + len(tokens))
        first, last = begin + max(offset - 1, 0), begin + min(stop - 1, end - begin)  # of the document's tokens
        if offset == 0:
            tokens[0] = special.cls
        if stop == end - begin + 2:
            tokens[stop - offset - 1] = special.sep
        if first < last:
            text = slice(max(1 - offset, 0), max(1 - offset, 0) + last - first)
            tokens[text] = self._reader.tokens(first, last)
            if self._shape.mark_sentences:
                begins[text] = self._reader.begins(first, last)
        return stop - offset

    def documents_of(self, index: int) -> str:
        """The documents of sample `index`."""
        window = int(self._arrays["shuffle_index"][index])
        (first, _), (last, _) = self._arrays["sample_index"][window : window + 2].tolist()
        numbers = ", ".join(str(number) for number in self._arrays["document_index"][first : last + 1].tolist())
        return f"documents {numbers} of {self._reader.indexed.prefix}"


def truncated(
    a: tuple[int, int], b: tuple[int, int], room: int, rng: np.random.Generator
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two ranges of tokens, cut until both together fit: a token at a time from the longer one (from the second where
    they are equally long), at its front or its back by lot."""
    long_a, long_b = a[1] - a[0], b[1] - b[0]
    excess = long_a + long_b - room
    if excess <= 0:
        return a, b
    level = min(abs(long_a - long_b), excess)
    from_a = (level if long_a > long_b else 0) + (excess - level) // 2
    front_a, front_b = rng.binomial(from_a, 0.5), rng.binomial(excess - from_a, 0.5)
    return (
        (a[0] + front_a, a[1] - (from_a - front_a)),
        (b[0] + front_b, b[1] - (excess - from_a - front_b)),
    )


def _pair_chunks(split: Split, room: int) -> Arrays:
    return cached_arrays(
        split.cache_dir,
        {**split.describe(), "pairs": room},
        lambda: sentence_chunks(split.indexed, split.documents, target=room),
    )


def _check_chunks(chunks: Arrays, split: Split, *, swap: bool) -> None:
    documents = chunks["document"]
    if not len(documents):
        raise DataError(f"{split.indexed.idx_path}: no document of this split has two sentences")
    if not swap and documents[0] == documents[-1]:
        raise DataError(f"{split.indexed.idx_path}: only one document of this split has two sentences")


def _require_tokens(lengths: NDArray[np.int64], split: Split) -> None:
    if not lengths.any():
        raise DataError(f"{split.indexed.idx_path}: the {len(lengths)} documents of this split hold no tokens")
