"""Which sentences make up a sentence pair: consecutive ones of a document, as many as fill a sample, at least two.

For every sentence the end of a chunk that began there is found at once, by binary search over the sentences' ends; the
chunks themselves are then a walk from end to end, the only loop in Python, with one step per chunk. It goes over the
documents in blocks, so that memory does not grow with the dataset.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megacore.data.gpt.index_cache import Arrays
from megacore.data.indexed.reader import IndexedDataset

_BLOCK = 1 << 22  # sentences looked at at a time, or one document's


def sentence_chunks(indexed: IndexedDataset, documents: range, *, target: int) -> Arrays:
    """Gather sentences into chunks.

    A chunk ends with the sentence that brings it to `target` tokens, or with its document; it has two sentences with
    tokens at least, and where it would leave a single one over, it takes that too. A document with fewer than two has
    no chunk.

    Args:
        indexed: The dataset.
        documents: The documents to use.
        target: Tokens that a chunk has at least, where its document does not end before.

    Returns:
        int64 [n] each: `first` and `stop`, the sequences of a chunk, and `document`, ascending.
    """
    parts: list[tuple[NDArray[np.int64], ...]] = []
    boundaries = indexed.document_indices
    begin = documents.start
    while begin < documents.stop:
        end = int(np.searchsorted(boundaries, boundaries[begin] + _BLOCK, side="right")) - 1
        end = min(max(end, begin + 1), documents.stop)
        parts.append(_chunks_of(indexed, range(begin, end), target))
        begin = end
    columns = zip(*parts, strict=True) if parts else ((np.empty(0, np.int64),),) * 3
    return dict(zip(("first", "stop", "document"), map(np.concatenate, columns), strict=True))


def paired_documents(indexed: IndexedDataset, documents: range) -> int:
    """How many documents have two sentences with tokens, counted up to two."""
    count = 0
    boundaries = indexed.document_indices
    begin = documents.start
    while begin < documents.stop and count < 2:
        end = int(np.searchsorted(boundaries, boundaries[begin] + _BLOCK, side="right")) - 1
        end = min(max(end, begin + 1), documents.stop)
        _, stops = _sentences(indexed, range(begin, end))
        count += int((np.diff(stops, prepend=0) >= 2).sum())
        begin = end
    return min(count, 2)


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
    following = np.searchsorted(ends, ends - lengths + target) + 1
    following = np.minimum(np.maximum(following, np.arange(len(real)) + 2), stop)
    following[stop - following == 1] += 1
    firsts = _walk(following.tolist(), stop.tolist())
    lasts = following[firsts] - 1
    document = documents.start + np.searchsorted(stops, firsts, side="right")
    return offset + real[firsts], offset + real[lasts] + 1, document


def _walk(following: list[int], stop: list[int]) -> NDArray[np.int64]:
    """The first sentences of all chunks."""
    firsts, at, count = [], 0, len(stop)
    while at < count:
        if stop[at] - at >= 2:
            firsts.append(at)
            at = following[at]
        else:
            at = stop[at]
    return np.array(firsts, np.int64)
