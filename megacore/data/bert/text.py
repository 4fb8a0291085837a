"""A sample of BERT before it is masked: sentence pairs, single segments, or packed documents.

Sample k of a split is laid out given the sample's random numbers. What the order of samples follows from is computed
once and cached, as for GPT: epochs follow each other, each in a different order.

- Pairs (nsp, sop): a document's sentences are gathered until they fill a sample; such a chunk is cut at a random
  sentence into A and B. For nsp, half of the Bs begin at a random sentence of another chunk, of another document, and
  what followed A waits for its next epoch. For sop, half of the pairs are swapped.
- Segments (none): a document is cut into pieces of a sample's length; the last one may be short.
- Packed: the stream of [CLS] document [SEP] is cut into samples that are full to the last token; a document that does
  not fit continues in another sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megacore.data.bert.masking import Bools, SpecialTokens
from megacore.data.gpt.dataset import build_indices, extent
from megacore.data.gpt.index_cache import Arrays, cached_arrays
from megacore.data.gpt.shuffling import shuffled_epochs
from megacore.data.indexed.reader import IndexedDataset, int64_tokens
from megacore.errors import DataError

_VERSION = 1  # of what is cached: raise it when the same inputs give other indices
_BLOCK = 1 << 22  # sentences looked at at a time, or one document's
NO_LABEL = -1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A sample before masking, without padding."""

    tokens: NDArray[np.int64]  # int64 [n], n at most the sample's length
    token_types: NDArray[np.int64]  # int64 [n]
    documents: NDArray[np.int64]  # int64 [n]
    begins: Bools | None  # bool [n], where a sentence begins; None where nobody asks
    label: int = NO_LABEL  # of the sentence task, -1 without one


def joined(
    special: SpecialTokens, segments: Sequence[NDArray[np.int64]], begins: Sequence[Bools] | None, label: int = NO_LABEL
) -> Layout:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP]. `begins`: where sentences begin in each; None where nobody asks."""
    end, gap = np.array([special.sep]), np.zeros(1, np.bool_)
    tokens = np.concatenate([[special.cls], *(part for segment in segments for part in (segment, end))])
    sizes = np.array([len(segment) + 1 for segment in segments])
    sizes[0] += 1
    marks = None if begins is None else np.concatenate([gap, *(part for one in begins for part in (one, gap))])
    types = np.repeat(np.arange(len(segments)), sizes)
    return Layout(tokens=tokens, token_types=types, documents=np.ones_like(tokens), begins=marks, label=label)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the samples of a run have in common."""

    seq_length: int  # tokens of a sample, special ones and padding included
    special: SpecialTokens
    short_seq_prob: float  # share of the samples that are cut to a random length
    mark_sentences: bool  # whether a layout says where sentences begin
    vocab_size: int  # size of the vocabulary, checked in every sample


@dataclass(frozen=True, kw_only=True)
class Split:
    """The part of a dataset that samples are made of, and how many are needed."""

    indexed: IndexedDataset
    documents: range
    num_samples: int  # samples that will be asked for; epochs are added as needed
    seed: int
    cache_dir: Path | None = None  # directory of the index cache; None keeps the indices in memory

    def cached(
        self, description: dict[str, object], build: Callable[[], Arrays], *, of_documents: bool = True
    ) -> Arrays:
        """Arrays that follow from a description, and, unless they are only an order, from the documents."""
        known: dict[str, object] = {"version": _VERSION, "numpy": np.__version__.split(".")[0]}
        if of_documents:
            known["idx"] = self.indexed.fingerprint if self.cache_dir else ""
            known["documents"] = [self.documents.start, self.documents.stop]
        return cached_arrays(self.cache_dir, known | description, build)

    def order(self, count: int) -> NDArray[np.int64]:
        """Which of `count` units each sample is, epoch after epoch."""
        epochs = max(1, -(-self.num_samples // count))
        order = {"order": [count, epochs], "seed": self.seed}
        return self.cached(order, lambda: {"order": shuffled_epochs(count, epochs, self.seed)}, of_documents=False)[
            "order"
        ]


class BertText:
    """Lays out the samples of a split. `kind`: The sentence task, or `packed`. Raises DataError where the documents
    hold no tokens, or not the sentences that the task needs."""

    def __init__(self, split: Split, shape: Shape, kind: Literal["nsp", "sop", "none", "packed"]) -> None:
        self.kind, self._shape, self._indexed, self._first = kind, shape, split.indexed, split.documents.start
        indexed, documents = split.indexed, split.documents
        self._room = shape.seq_length - (2 if kind == "none" else 3)
        if kind in ("nsp", "sop"):
            build = partial(sentence_chunks, indexed, documents, target=self._room)
            self.arrays = split.cached({"pairs": self._room}, build)
            numbers = self.arrays["document"]
            if not len(numbers):
                raise DataError(f"{indexed.idx_path}: no document of this split has two sentences")
            if kind == "nsp" and numbers[0] == numbers[-1]:
                raise DataError(f"{indexed.idx_path}: only one document of this split has two sentences")
            self._order = split.order(len(numbers))
            return
        self._offsets = indexed.document_offsets(documents.start, documents.stop)
        lengths = np.diff(self._offsets)
        if not lengths.any():
            raise DataError(f"{indexed.idx_path}: the {len(lengths)} documents of this split hold no tokens")
        if kind == "none":
            self._pieces = np.cumsum(-(-lengths // self._room))  # of each document and those before it
            self._order = split.order(int(self._pieces[-1]))
            return
        kept = np.flatnonzero(lengths)
        units = lengths[kept] + 2
        size = extent(int(units.sum()), split.num_samples, shape.seq_length)
        description = {"packed": [shape.seq_length, size.epochs, size.windows, size.passes], "seed": split.seed}
        options = {"num_samples": split.num_samples, "seq_length": shape.seq_length, "seed": split.seed}
        self.arrays = split.cached(description, lambda: build_indices(kept + documents.start, units, **options))

    def layout(self, index: int, rng: np.random.Generator) -> Layout:
        """Sample `index`, drawn with the sample's random numbers; packed ones need none."""
        if self.kind == "packed":
            return self._packed(index)
        spans, label = ([self._segment(index, rng)], NO_LABEL) if self.kind == "none" else self._pair(index, rng)
        begins = [self._begins(*span) for span in spans] if self._shape.mark_sentences else None
        return joined(self._shape.special, [self._tokens(*span) for span in spans], begins, label)

    def documents_of(self, index: int) -> str:
        """The documents of sample `index`; the second segment of a pair may be another one's."""
        if self.kind == "packed":
            window = int(self.arrays["shuffle_index"][index])
            (first, _), (last, _) = self.arrays["sample_index"][window : window + 2].tolist()
            numbers = ", ".join(str(number) for number in self.arrays["document_index"][first : last + 1].tolist())
            return f"documents {numbers} of {self._indexed.prefix}"
        number = int(self._order[index])
        if self.kind == "none":
            number = self._first + int(np.searchsorted(self._pieces, number, side="right"))
        else:
            number = int(self.arrays["document"][number])
        return f"document {number} of {self._indexed.prefix}"

    def _tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        return int64_tokens(self._indexed, start, stop, self._shape.vocab_size)

    def _begins(self, start: int, stop: int) -> Bools:
        """bool [stop - start]: where in those tokens a sequence begins."""
        size, pointers = self._indexed.dtype.itemsize, self._indexed.sequence_pointers
        first, last = np.searchsorted(pointers, (start * size, stop * size))
        marks = np.zeros(stop - start, np.bool_)
        marks[pointers[first:last] // size - start] = True
        return marks

    def _pair(self, index: int, rng: np.random.Generator) -> tuple[list[tuple[int, int]], int]:
        chunk, room = int(self._order[index]), self._room
        bounds = self._bounds(int(self.arrays["first"][chunk]), int(self.arrays["stop"][chunk]))
        if rng.random() < self._shape.short_seq_prob:
            room = int(rng.integers(2, room + 1))
            last = int(np.searchsorted(bounds, bounds[-1] - room, side="right")) - 1  # from which on there is enough
            start = int(rng.integers(min(max(last, 0), len(bounds) - 3) + 1))
            # Two sentences at least, so that there is a place to cut.
            end = max(int(np.searchsorted(bounds, bounds[start] + room)), start + 2)
            bounds = bounds[start : end + 1]
        cut = int(bounds[rng.integers(1, len(bounds) - 1)])
        a, b = (int(bounds[0]), cut), (cut, int(bounds[-1]))
        label = int(rng.random() < 0.5)
        if label and self.kind == "sop":
            a, b = b, a
        elif label:
            b = self._elsewhere(chunk, max(room - (a[1] - a[0]), 1), rng)
        return list(truncated(a, b, room, rng)), label

    def _bounds(self, first: int, stop: int) -> NDArray[np.int64]:
        """int64 [n + 1]: token offsets where the n sentences that hold tokens begin, then where the last one ends."""
        lengths = self._indexed.sequence_lengths[first:stop].astype(np.int64)
        begin = int(self._indexed.sequence_pointers[first]) // self._indexed.dtype.itemsize
        return np.concatenate(([begin], begin + np.cumsum(lengths[lengths > 0])))

    def _elsewhere(self, chunk: int, wanted: int, rng: np.random.Generator) -> tuple[int, int]:
        """Whole sentences of another document, with this number of tokens or a little more."""
        documents = self.arrays["document"]
        low, high = np.searchsorted(documents, documents[chunk] + np.arange(2)).tolist()
        other = int(rng.integers(len(documents) - (high - low)))
        other += high - low if other >= low else 0
        first, stop = int(self.arrays["first"][other]), int(self.arrays["stop"][other])
        lengths = self._indexed.sequence_lengths[first:stop]
        real = np.flatnonzero(lengths)
        start = first + int(real[rng.integers(len(real))])
        document_stop = int(self._indexed.document_indices[documents[other] + 1])
        bounds = self._bounds(start, min(start + wanted, document_stop))
        end = min(int(np.searchsorted(bounds, bounds[0] + wanted)), len(bounds) - 1)
        return int(bounds[0]), int(bounds[end])

    def _segment(self, index: int, rng: np.random.Generator) -> tuple[int, int]:
        """The range of a segment."""
        piece = int(self._order[index])
        document = int(np.searchsorted(self._pieces, piece, side="right"))
        before = int(self._pieces[document - 1]) if document else 0
        start = int(self._offsets[document]) + (piece - before) * self._room
        stop = min(start + self._room, int(self._offsets[document + 1]))
        if rng.random() < self._shape.short_seq_prob:
            length = min(int(rng.integers(1, self._room + 1)), stop - start)
            start += int(rng.integers(stop - start - length + 1))
            stop = start + length
        return start, stop

    def _packed(self, index: int) -> Layout:
        position, offset = self.arrays["sample_index"][int(self.arrays["shuffle_index"][index])].tolist()
        length = self._shape.seq_length
        tokens, documents, begins = np.empty(length, np.int64), np.empty(length, np.int64), np.zeros(length, np.bool_)
        filled = number = 0
        while filled < length:
            number += 1
            document = int(self.arrays["document_index"][position])
            size = self._fill(tokens[filled:], begins[filled:], document, offset)
            documents[filled : filled + size] = number
            filled, position, offset = filled + size, position + 1, 0
        marks = begins if self._shape.mark_sentences else None
        return Layout(tokens=tokens, token_types=np.zeros(length, np.int64), documents=documents, begins=marks)

    def _fill(self, tokens: NDArray[np.int64], begins: Bools, document: int, offset: int) -> int:
        """Write [CLS], a document, [SEP] from `offset` on, as far as there is room; returns how much that was."""
        indexed, special = self._indexed, self._shape.special
        begin, end = indexed.document_start(document), indexed.document_start(document + 1)
        stop = min(end - begin + 2, offset + len(tokens))
        first, last = begin + max(offset - 1, 0), begin + min(stop - 1, end - begin)  # of the document's tokens
        if offset == 0:
            tokens[0] = special.cls
        if stop == end - begin + 2:
            tokens[stop - offset - 1] = special.sep
        if first < last:
            text = slice(max(1 - offset, 0), max(1 - offset, 0) + last - first)
            tokens[text] = self._tokens(first, last)
            if self._shape.mark_sentences:
                begins[text] = self._begins(first, last)
        return stop - offset


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


def sentence_chunks(indexed: IndexedDataset, documents: range, *, target: int) -> Arrays:
    """Which sentences make up a pair: consecutive ones of a document, at least two with tokens, until they have
    `target` tokens or the document ends; a chunk that would leave a single one over takes that too. Returns int64 [n]
    each: `first` and `stop`, the sequences of a chunk, and `document`, ascending."""
    parts = [_chunks_of(indexed, block, target) for block in _blocks(indexed, documents)]
    columns = zip(*parts, strict=True) if parts else ((np.empty(0, np.int64),),) * 3
    return dict(zip(("first", "stop", "document"), map(np.concatenate, columns), strict=True))


def paired_documents(indexed: IndexedDataset, documents: range) -> int:
    """How many documents have two sentences with tokens, counted up to two."""
    count = 0
    for block in _blocks(indexed, documents):
        _, stops = _sentences(indexed, block)
        count += int((np.diff(stops, prepend=0) >= 2).sum())
        if count >= 2:
            return 2
    return count


def _blocks(indexed: IndexedDataset, documents: range) -> Iterator[range]:
    """The documents in parts, so that memory does not grow with the dataset."""
    boundaries, begin = indexed.document_indices, documents.start
    while begin < documents.stop:
        end = int(np.searchsorted(boundaries, boundaries[begin] + _BLOCK, side="right")) - 1
        end = min(max(end, begin + 1), documents.stop)
        yield range(begin, end)
        begin = end


def _sentences(indexed: IndexedDataset, documents: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sequences with tokens of some documents, counted from their first one; how many there are up to the end of
    each document."""
    boundaries = indexed.document_indices[documents.start : documents.stop + 1]
    real = np.flatnonzero(indexed.sequence_lengths[boundaries[0] : boundaries[-1]])
    return real, np.searchsorted(real, boundaries[1:] - boundaries[0])


def _chunks_of(indexed: IndexedDataset, documents: range, target: int) -> tuple[NDArray[np.int64], ...]:
    real, stops = _sentences(indexed, documents)
    counts = np.diff(stops, prepend=0)
    offset = int(indexed.document_indices[documents.start])
    lengths = indexed.sequence_lengths[offset + real].astype(np.int64)
    ends = np.cumsum(lengths)
    stop = np.repeat(stops, counts)  # where the document of each sentence ends
    # The end of a chunk from every sentence, at once: the walk below is the only loop in Python, a step per chunk.
    following = np.searchsorted(ends, ends - lengths + target) + 1
    following = np.minimum(np.maximum(following, np.arange(len(real)) + 2), stop)
    # A single sentence would be left, and is no pair by itself.
    following[stop - following == 1] += 1
    chunk_starts, at, steps, ends_at = list[int](), 0, following.tolist(), stop.tolist()
    while at < len(steps):
        if ends_at[at] - at >= 2:
            chunk_starts.append(at)
            at = steps[at]
        else:
            at = ends_at[at]
    firsts = np.array(chunk_starts, np.int64)
    lasts = following[firsts] - 1
    document = documents.start + np.searchsorted(stops, firsts, side="right")
    return offset + real[firsts], offset + real[lasts] + 1, document
