"""Samples of whole documents: one document each, or several that fill the sample as far as possible.

Documents are packed by best-fit decreasing (Johnson 1973; for training data Ding et al. 2024, arXiv 2404.10830). A
longer one is split into pieces; the last token of a piece has the next one of its document as a label, the last of a
document none. Which documents share a sample is the same in every epoch; the order of the samples is another one.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megacore.data.gpt.dataset import SplitSamples
from megacore.data.gpt.index_cache import Arrays
from megacore.data.gpt.shuffling import generator, shuffled_epochs
from megacore.data.indexed.reader import int64_tokens
from megacore.data.indexed.sidecar import is_predicted
from megacore.errors import DataError

_VERSION = 1  # of packing and order: raise it when the same inputs give other samples
_PACKING = 2  # this use of the seed's random numbers
_EPOCH = 0
Whole = Literal["none", "best-fit"]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What an epoch of samples holds."""

    documents: int  # with something to predict
    samples: int  # of an epoch
    padding: float  # share of the positions that are padding
    longer: int  # documents that are longer than a sample
    cut: float  # share of the tokens that no sample holds


@runtime_checkable
class KnowsPacking(Protocol):
    """A dataset whose samples may be padded."""

    @property
    def packing(self) -> Packing | None:
        """What an epoch of samples holds."""


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Put pieces into samples: the longest first, each where the least room is left that is enough. Pieces of one
    length are placed together, so that the time grows with the number of different lengths. `lengths`: [n], 1 to
    `capacity` each. Returns [n]: the number of each piece's sample."""
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    assigned = np.empty(len(lengths), np.int64)
    open_samples: dict[int, deque[NDArray[np.int64]]] = {}  # room -> samples with that much of it
    rooms: list[int] = []  # those of `open_samples`, ascending
    samples = done = 0

    def leave(room: int, numbers: NDArray[np.int64]) -> None:
        if room == 0 or not len(numbers):
            return
        if room not in open_samples:
            open_samples[room] = deque()
            insort(rooms, room)
        open_samples[room].append(numbers)

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            at = bisect_left(rooms, size)
            room = rooms[at] if at < len(rooms) else capacity
            each = room // size  # what is left of the best sample is again the best, as long as it is enough
            wanted = -(-(end - done) // each)
            if at < len(rooms):
                available = open_samples[room].popleft()
                chosen = available[:wanted]
                if len(available) > wanted:
                    open_samples[room].appendleft(available[wanted:])
                elif not open_samples[room]:
                    del open_samples[room], rooms[at]
            else:
                chosen = np.arange(samples, samples + wanted)
                samples += wanted
            placed = min(end - done, len(chosen) * each)
            assigned[order[done : done + placed]] = np.repeat(chosen, each)[:placed]
            in_last = placed - (len(chosen) - 1) * each
            leave(room - each * size, chosen[:-1])
            leave(room - in_last * size, chosen[-1:])
            done += placed
    return assigned


def _packed(lengths: NDArray[np.int64], seq_length: int, seed: int) -> Arrays:
    """Best-fit packs of the documents of these lengths. Returns `document` and `offset` [pieces] of the first token of
    each piece, sample by sample; `begin` [samples + 1], the first piece of each sample."""
    # All tokens of a last piece of one token are labels of the piece before it.
    pieces = np.where(lengths > 1, -(-(lengths - 1) // seq_length), 0)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * seq_length
    sizes = np.minimum(lengths[document] - offset, seq_length)
    # Documents of one length are taken in a random order, so that neighbours in the dataset do not share samples.
    mixed = generator(seed, _EPOCH, _PACKING).permutation(len(document))
    sample = np.empty(len(document), np.int64)
    sample[mixed] = best_fit_decreasing(sizes[mixed], seq_length)
    order = np.argsort(sample, kind="stable")
    begin = np.concatenate(([0], np.cumsum(np.bincount(sample))))
    return {"document": document[order], "offset": offset[order], "begin": begin}


def _single(lengths: NDArray[np.int64]) -> Arrays:
    """One sample for each document with something to predict; arrays as of `_packed`."""
    document = np.flatnonzero(lengths > 1)
    return {"document": document, "offset": np.zeros_like(document), "begin": np.arange(len(document) + 1)}


@dataclass(kw_only=True, eq=False, repr=False)
class PackedDataset(SplitSamples):
    """Padded samples of whole documents. Only --packing none can fill in the middle of the document of a sample. Raises
    DataError where no document has two tokens, or the loss mask belongs to another dataset."""

    mode: Whole = field(kw_only=False)  # one document per sample, cut if it is longer, or best-fit packs
    tells_padding: bool = False  # whether samples also tell `padding`, where they tell `documents`

    def __post_init__(self) -> None:
        assert self.fill_in is None or self.mode == "none"
        super().__post_init__()
        lengths, seq_length = np.diff(self._offsets), self.seq_length
        self.packs = self._cached(
            _VERSION,
            {"packing": self.mode},
            lambda: _packed(lengths, seq_length, self.seed) if self.mode == "best-fit" else _single(lengths),
        )
        samples = len(self.packs["begin"]) - 1
        if samples == 0:
            raise DataError(
                f"{self.indexed.idx_path}: none of the {len(lengths)} documents of this split has two tokens, and so "
                f"--packing {self.mode} has nothing to predict"
            )
        epochs = max(1, -(-self.num_samples // samples))
        self.order = self._cached(
            _VERSION,
            {"packing": self.mode, "order": [samples, epochs]},
            lambda: {"order": shuffled_epochs(samples, epochs, self.seed)},
        )["order"]
        # A document's last token needs no room where it is only a label.
        used = lengths[lengths > 1]
        held = np.minimum(used, seq_length) if self.mode == "none" else used - ((used - 1) % seq_length == 0)
        read = np.minimum(used, seq_length + 1) if self.mode == "none" else used
        self.packing = Packing(
            documents=len(used),
            samples=samples,
            padding=1.0 - float(held.sum()) / (samples * seq_length),
            longer=int((used > seq_length + 1).sum()),
            cut=1.0 - float(read.sum()) / float(used.sum()),
        )

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """Sample `index`: tokens int64 [s], labels int64 [s] (the next tokens of the same document) and loss_mask
        float32 [s], and what the dataset tells of `PackedMicrobatch` and `PaddedMicrobatch`. Raises DataError for an id
        outside the vocabulary."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        tokens, labels, documents, positions = np.zeros((4, self.seq_length), np.int64)
        mask = np.zeros(self.seq_length, np.float32)
        filled = 0
        for number, (start, stop) in enumerate(self._spans(int(self.order[index])), 1):
            read = int64_tokens(self.indexed, start, stop, self.vocab_size)
            counted = None if self._mask is None else is_predicted(self._mask, start, stop).astype(np.float32)
            if self.fill_in is not None:
                read, counted = self.fill_in.document(index, read, counted)
                read, counted = read[: self.seq_length + 1], counted[: self.seq_length + 1]
            size = min(len(read), self.seq_length - filled)
            here, predicted = slice(filled, filled + size), slice(filled, filled + len(read) - 1)
            tokens[here], labels[predicted] = read[:size], read[1:]
            mask[predicted] = 1.0 if counted is None else counted[1:]
            documents[here], positions[here] = number, np.arange(size)
            filled += size
        documents[filled:], positions[filled:] = documents[filled - 1] + 1, np.arange(self.seq_length - filled)
        if self.eod is not None:
            mask[tokens == self.eod] = 0.0
        sample: dict[str, NDArray] = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        if self.tells_padding:
            sample["padding"] = (np.arange(self.seq_length) >= filled).astype(np.int64)
        return sample | {"documents": documents, "positions": positions} if self.boundaries else sample

    def documents_of(self, index: int) -> str:
        """The documents of sample `index`, by their numbers in the dataset."""
        first, stop = self.packs["begin"][self.order[index] :][:2]
        numbers = ", ".join(str(number + self.documents.start) for number in self.packs["document"][first:stop])
        return f"documents {numbers} of {self.indexed.prefix}"

    def _spans(self, sample: int) -> list[tuple[int, int]]:
        """The ranges of the .bin whose tokens a sample holds; of each the last may be a label only."""
        first, stop = self.packs["begin"][sample : sample + 2].tolist()
        spans = []
        for document, offset in zip(
            self.packs["document"][first:stop].tolist(), self.packs["offset"][first:stop].tolist(), strict=True
        ):
            start, end = int(self._offsets[document]) + offset, int(self._offsets[document + 1])
            spans.append((start, min(end, start + self.seq_length + 1)))
        return spans


def mixed_packing(parts: list[tuple[Packing, int]]) -> Packing:
    """Of datasets that are mixed, each with the number of its samples that are drawn."""
    drawn = sum(count for _, count in parts) or 1
    totals = {name: sum(getattr(part, name) for part, _ in parts) for name in ("documents", "samples", "longer")}
    shares = {name: sum(getattr(part, name) * count for part, count in parts) / drawn for name in ("padding", "cut")}
    return dataclasses.replace(parts[0][0], **totals, **shares)
