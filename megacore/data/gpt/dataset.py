"""Samples for a left-to-right language model: windows of seq_length + 1 tokens over shuffled documents.

Three int64 indices, built without a Python loop over documents, samples or many epochs and cached on disk:

- document_index: the documents, in a new order for each epoch, one epoch after the other: an endless stream of tokens;
- sample_index: window w covers tokens [w * seq_length, (w + 1) * seq_length] of it, which overlaps the next by a label;
  row w is its start: (position in document_index, offset in that document);
- shuffle_index: which window sample k is. Every epoch is shuffled by itself, and the window that runs over comes last.

So the order depends only on (seed, epoch, k), and a longer run continues a shorter one. In Megatron-LM's order
(megatron_order.py), which shuffles epochs together, it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megacore.data.gpt import megatron_order
from megacore.data.gpt.fill_in_middle import FillInTheMiddle
from megacore.data.gpt.index_cache import Arrays, cached_arrays
from megacore.data.gpt.shuffling import EPOCHS_DRAWN_SEPARATELY, generator, shuffled_epochs
from megacore.data.indexed.reader import IndexedDataset, int64_tokens
from megacore.data.indexed.sidecar import is_predicted, open_loss_mask
from megacore.errors import DataError

_VERSION = 2  # of the order: raise it when the same inputs give other indices
_SAMPLES = 1  # this use of an epoch's random numbers; 0 is the order of the documents


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of the endless stream a number of samples needs."""

    epochs: int  # epochs whose windows are used
    windows: int  # Windows, of all those epochs, that samples may be
    passes: int  # times the documents are laid out; one more than `epochs` if the last window runs over


def extent(tokens_per_epoch: int, num_samples: int, seq_length: int) -> Extent:
    """The extent of the first `num_samples` samples, in exact integers."""
    # first(e) = ceil(e * tokens / seq): the first window that starts in epoch e, or the number of those before it.
    epochs = max(1, -(-((num_samples - 1) * seq_length + 1) // tokens_per_epoch))
    first_of_next = -(-epochs * tokens_per_epoch // seq_length)
    # The last window of an epoch has no label for its last token within the epoch. It is also the epoch's last sample,
    # so that only a request for every last sample needs tokens of the next epoch.
    runs_over = num_samples >= first_of_next
    windows = first_of_next if runs_over else first_of_next - 1
    passes = max(epochs, -(-(windows * seq_length + 1) // tokens_per_epoch))
    return Extent(epochs=epochs, windows=windows, passes=passes)


def build_indices(
    documents: NDArray[np.int64], lengths: NDArray[np.int64], *, num_samples: int, seq_length: int, seed: int
) -> Arrays:
    """`document_index` [passes * n], `sample_index` [windows + 1, 2] and `shuffle_index` [windows], all int64.
    `documents`: [n] numbers, each once. `lengths`: [n] tokens of each of them."""
    tokens = int(lengths.sum())
    size = extent(tokens, num_samples, seq_length)
    order = shuffled_epochs(len(documents), size.passes, seed)
    laid_out = lengths[order]
    ends = np.cumsum(laid_out)
    # Windows that start in a document: multiples of seq_length in [start, end). Repeating each position by that number
    # gives every window's document in one pass.
    begun = (ends + (seq_length - 1)) // seq_length  # windows that start before each document's end
    position = np.repeat(np.arange(len(order)), np.diff(begun, prepend=0))[: size.windows + 1]
    windows = np.empty((size.windows + 1, 2), np.int64)
    windows[:, 0] = position
    windows[:, 1] = np.arange(size.windows + 1) * seq_length - (ends[position] - laid_out[position])
    return {
        "document_index": documents[order],
        "sample_index": windows,
        "shuffle_index": _shuffle(tokens, size, seq_length, seed),
    }


def _shuffle(tokens: int, size: Extent, seq_length: int, seed: int) -> NDArray[np.int64]:
    """Every epoch's windows in a random order, the one that runs over into the next epoch last."""
    shuffle = np.arange(size.windows)
    firsts = -(-np.arange(size.epochs + 1) * tokens // seq_length)  # the first window that starts in each epoch
    counts = np.diff(firsts) - 1  # windows to shuffle; an epoch's differ by one at most
    separate = min(size.epochs, EPOCHS_DRAWN_SEPARATELY)
    for epoch in range(separate):
        if counts[epoch] > 1:
            generator(seed, epoch, _SAMPLES).shuffle(shuffle[firsts[epoch] : firsts[epoch] + counts[epoch]])
    for count in np.unique(counts[separate:]).tolist():
        if count > 1:
            # A separate generator for each count: so no epoch's order depends on how many epochs there are.
            rows = firsts[separate:-1][counts[separate:] == count][:, None] + np.arange(count)
            shuffle[rows] = generator(seed, EPOCHS_DRAWN_SEPARATELY, _SAMPLES, count).permuted(rows, axis=1)
    return shuffle


@dataclass(kw_only=True, eq=False, repr=False)
class SplitSamples:
    """Samples of one dataset, or of one split of it. Raises DataError where the loss mask belongs to another
    dataset."""

    # The opened .bin/.idx. Where a loss mask lies beside it, only the tokens that it marks are predicted.
    indexed: IndexedDataset = field(kw_only=False)
    documents: range = field(kw_only=False)
    num_samples: int  # samples that will be asked for; epochs are added as needed
    seq_length: int  # tokens of a sample
    seed: int  # seed of the order
    cache_dir: Path | None = None  # directory of the index cache; None keeps the indices in memory
    # Id of the end-of-document token if the loss is to leave it out as an input (`--eod-mask-loss`).
    eod: int | None = None
    vocab_size: int | None = None  # size of the vocabulary, checked in every sample; None checks nothing
    boundaries: bool = False  # whether samples tell `documents` and `positions`
    fill_in: FillInTheMiddle | None = None  # puts the middle of documents last; None leaves them as they are

    def __post_init__(self) -> None:
        self._mask = open_loss_mask(self.indexed)
        self._offsets = self.indexed.document_offsets(self.documents.start, self.documents.stop)

    def __len__(self) -> int:
        return self.num_samples

    def _cached(self, version: int, description: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Arrays that follow from the documents and a description."""
        known = {
            "version": version,
            "numpy": np.__version__.split(".")[0],
            "idx": self.indexed.fingerprint if self.cache_dir else "",
            "documents": [self.documents.start, self.documents.stop],
            "seq_length": self.seq_length,
            "seed": self.seed,
        }
        return cached_arrays(self.cache_dir, known | description, build)


@dataclass(kw_only=True, eq=False, repr=False)
class GPTDataset(SplitSamples):
    """Windows of the stream of documents. With `eod`, the loss leaves out the last token of each document too. Raises
    DataError where the documents hold no tokens, or the loss mask belongs to another dataset."""

    order: Literal["megacore", "megatron"] = "megacore"  # whose order of samples

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers, lengths = np.arange(self.documents.start, self.documents.stop), np.diff(self._offsets)
        tokens = int(lengths.sum())
        if tokens == 0:
            raise DataError(f"{self.indexed.idx_path}: the {len(numbers)} documents of this split hold no tokens")
        size = extent(tokens, self.num_samples, self.seq_length)
        description: dict[str, Any] = {"extent": [size.epochs, size.windows, size.passes]}
        build = build_indices
        if self.order == "megatron":
            description |= {"order": self.order, "samples": self.num_samples}
            build = megatron_order.build_indices
        options = {"num_samples": self.num_samples, "seq_length": self.seq_length, "seed": self.seed}
        arrays = self._cached(_VERSION, description, lambda: build(numbers, lengths, **options))
        self.document_index, self.sample_index = arrays["document_index"], arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """Sample `index`: tokens int64 [s], labels int64 [s] (the next tokens) and loss_mask float32 [s]; with
        boundaries also documents and positions, as in `PackedMicrobatch`. Raises DataError where the sample holds a
        token id outside the vocabulary."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        spans = self._spans(int(self.shuffle_index[index]))
        window, predicted = self._window(spans), None
        if self._mask is not None:
            predicted = np.concatenate([is_predicted(self._mask, *span) for span in spans]).astype(np.float32)
        sizes = np.array([stop - start for start, stop in spans])
        if self.fill_in is not None:
            window, lengths, predicted = self.fill_in.window(index, window, sizes.tolist(), predicted)
            sizes = np.array(lengths)
        tokens, labels = window[:-1], window[1:]
        mask = np.ones(self.seq_length, np.float32) if predicted is None else predicted[1:]
        if self.eod is not None:
            mask[tokens == self.eod] = 0.0
            mask[np.cumsum(sizes[:-1]) - 1] = 0.0
        sample: dict[str, NDArray] = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        if self.boundaries:
            sizes = sizes[sizes > 0]
            begins = np.repeat(np.cumsum(sizes) - sizes, sizes)[:-1]
            sample["documents"] = np.repeat(np.arange(1, len(sizes) + 1), sizes)[:-1]
            sample["positions"] = np.arange(self.seq_length) - begins
        return sample

    def documents_of(self, index: int) -> str:
        """The documents of sample `index`, by their numbers in the dataset."""
        window = int(self.shuffle_index[index])
        (first, _), (last, _) = self.sample_index[window : window + 2].tolist()
        numbers = ", ".join(str(number) for number in self.document_index[first : last + 1].tolist())
        return f"documents {numbers} of {self.indexed.prefix}"

    def window(self, window: int) -> NDArray[np.int64]:
        """int64 [s + 1]: the tokens of a window of the stream."""
        return self._window(self._spans(window))

    def _window(self, spans: list[tuple[int, int]]) -> NDArray[np.int64]:
        pieces = [self.indexed.tokens(start, stop) for start, stop in spans]
        values = (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).astype(np.int64)
        if self.vocab_size is not None and (values.max() >= self.vocab_size or values.min() < 0):
            for start, stop in spans:  # one of them says which token it is
                int64_tokens(self.indexed, start, stop, self.vocab_size)
        return values

    def _spans(self, window: int) -> list[tuple[int, int]]:
        """The ranges of the .bin that make up a window."""
        (first, offset), (last, last_offset) = self.sample_index[window : window + 2].tolist()
        spans = []
        for index in range(first, last + 1):
            document = int(self.document_index[index])
            start = self.indexed.document_start(document)
            stop = start + last_offset + 1 if index == last else self.indexed.document_start(document + 1)
            spans.append((start + offset, stop))
            offset = 0
        return spans
