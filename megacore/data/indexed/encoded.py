"""The tokens of a chunk, as an encoder gives them to who writes them: packed bytes, since pickling lists of Python
integers would cost more than making them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megacore.data.indexed.corpus import Chunk
from megacore.data.indexed.documents import BadLine

Ids = Sequence[int] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The tokens of a chunk for one output, as bytes of the output's dtype, int32 lengths and int64 document sizes.

    Those of a long line are in an open temporary file, which whoever writes them closes.
    """

    tokens: bytes | BinaryIO
    lengths: bytes
    document_sizes: bytes


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tokenized chunk.

    Attributes:
        packed: the tokens for each output.
        documents: in it.
        empty: documents without tokens, which are left out.
        bad: lines without a document.
        digests: of the documents, one after the other, where repeated ones are left out.
    """

    packed: tuple[Packed, ...]
    documents: int
    empty: int
    bad: list[BadLine]
    digests: bytes = b""


ChunkEncoder = Callable[[Chunk], Encoded]


def close_files(parts: Sequence[Packed]) -> None:
    """Remove the temporary files."""
    for part in parts:
        if not isinstance(part.tokens, bytes):
            part.tokens.close()


def packed(documents: Sequence[Sequence[Ids]], dtype: np.dtype, tail: Sequence[int] = ()) -> Packed:
    """Documents of sequences of numbers, each document with a tail."""
    sizes = np.fromiter(map(len, documents), np.int64, count=len(documents))
    lengths = np.fromiter((len(ids) for sequences in documents for ids in sequences), np.int32)
    if tail:
        lengths[np.cumsum(sizes) - 1] += len(tail)
    parts = ((*sequences, tail) for sequences in documents) if tail else documents
    pieces = list(chain.from_iterable(parts))
    if any(isinstance(piece, np.ndarray) for piece in pieces[:1]):
        tokens = np.concatenate([np.asarray(piece, np.uint32) for piece in pieces]).astype(dtype)
    else:
        tokens = np.fromiter(chain.from_iterable(pieces), dtype, count=int(lengths.sum(dtype=np.int64)))
    return Packed(tokens=tokens.tobytes(), lengths=lengths.tobytes(), document_sizes=sizes.tobytes())
