"""Megatron-LM's .bin/.idx dataset format: a reader that trusts nothing and checks everything at opening.

`.bin` holds token arrays one after the other; `.idx` (little-endian) says where they begin: magic 9 B, u64 version, u8
dtype code, u64 sequences S, u64 length D of the document list, i32[S] lengths, i64[S] byte offsets, i64[D] document
boundaries (first 0, last S), and in multimodal files i8[S] modes. All arithmetic is int64 or Python integers.
"""

from __future__ import annotations

import os
import struct
import zlib
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megacore.errors import DataError
from megacore.files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in ((1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (6, "f8"), (7, "f4"), (8, "u2"))
}
_CHUNK = 1 << 20  # entries checked at a time: bounds the memory that opening takes
_SCAN = 1 << 22  # tokens scanned at a time


def dtype_code(dtype: np.dtype) -> int:
    """The format's code of a dtype."""
    return next(code for code, known in DTYPES.items() if known == dtype)


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron-LM's writer picks for a vocabulary."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def idx_path(prefix: str | Path) -> Path:
    """Path of the index file of a dataset prefix."""
    return Path(f"{prefix}.idx")


def bin_path(prefix: str | Path) -> Path:
    """Path of the token file of a dataset prefix."""
    return Path(f"{prefix}.bin")


class _Header(NamedTuple):
    """The header of an .idx file: the dtype of tokens, how many sequences and document boundaries follow, and whether
    each sequence has a mode."""

    dtype: np.dtype
    sequences: int
    documents: int
    has_modes: bool


class IndexedDataset:
    """A memory-mapped .bin/.idx pair. `prefix`: Path without `.bin`/`.idx`; the suffix is tolerated. Raises DataError
    where a file is missing, damaged or does not belong to the other; the message names it and says why."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
        self.idx_path, self.bin_path = idx_path(self.prefix), bin_path(self.prefix)
        size, bin_size = _file_size(self.idx_path), _file_size(self.bin_path)
        self.dtype, sequences, documents, has_modes = self._read_header(size)
        self.num_tokens = bin_size // self.dtype.itemsize
        # A plain array over the map: np.memmap's slicing costs microseconds each time.
        index = _mapped(self.idx_path, np.dtype(np.uint8))
        self._index = index
        lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        modes_at = documents_at + 8 * documents
        # int32 [S], tokens per sequence.
        self.sequence_lengths: NDArray[np.int32] = index[lengths_at:pointers_at].view("<i4")
        # int64 [S], byte offset of each sequence in .bin.
        self.sequence_pointers: NDArray[np.int64] = index[pointers_at:documents_at].view("<i8")
        # int64 [D], sequence index where each document starts, then S.
        self.document_indices: NDArray[np.int64] = index[documents_at:modes_at].view("<i8")
        # int8 [S] in multimodal files, else None.
        self.sequence_modes: NDArray[np.int8] | None = index[modes_at:].view("i1") if has_modes else None
        self._check_ends(bin_size)
        self._check_sequences(bin_size)
        self._check_documents()
        self._tokens = _mapped(self.bin_path, self.dtype) if bin_size else np.empty(0, self.dtype)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        # Opened again in a worker process: pickling a memory map would copy the whole file.
        return IndexedDataset, (self.prefix,)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> NDArray:
        """Tokens of one sequence, a read-only view of the mapped file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self._tokens[start : start + int(self.sequence_lengths[index])]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Tokens `[offset, offset + length)` of one sequence (to its end without a length)."""
        return self[index][offset : None if length is None else offset + length]

    def tokens(self, start: int, stop: int) -> NDArray:
        """Tokens `[start, stop)` of the whole .bin, mapped."""
        return self._tokens[start:stop]

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def document_start(self, document: int) -> int:
        """Token offset in .bin where a document starts; for the number of documents, the number of tokens."""
        sequence = int(self.document_indices[document])
        return (
            self.num_tokens if sequence == len(self) else int(self.sequence_pointers[sequence]) // self.dtype.itemsize
        )

    def document_offsets(self, first: int, stop: int) -> NDArray[np.int64]:
        """int64 [stop - first + 1]: token offsets where documents `[first, stop)` start, then where the last ends."""
        starts = self.document_indices[first : stop + 1]
        # The boundary after the last sequence points at no sequence: it is clipped, then set to the end of the file.
        offsets = self.sequence_pointers[np.minimum(starts, len(self) - 1)] // self.dtype.itemsize
        offsets[starts == len(self)] = self.num_tokens
        return offsets

    @cached_property
    def fingerprint(self) -> str:
        """Length and CRC-32 of the .idx, which decides every sample: tells a changed dataset from a cached one."""
        return f"{len(self._index)}-{zlib.crc32(self._index.data):08x}"

    def _read_header(self, size: int) -> _Header:
        if size < HEADER.size:
            raise self._error(f"{size} bytes are too few for the {HEADER.size}-byte header: empty or truncated")
        with open(self.idx_path, "rb") as file:
            magic, version, code, sequences, documents = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC:
            raise self._error(f"wrong magic {magic!r}: not a Megatron .idx (expected {MAGIC!r})")
        if version == VERSION << 56:
            raise self._error("written big-endian; the format is little-endian")
        if version != VERSION:
            raise self._error(f"version {version}; only version {VERSION} is known")
        if code not in DTYPES:
            raise self._error(f"unknown dtype code {code} (known: 1 to 8)")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size not in (expected, expected + sequences):
            raise self._error(
                f"{size} bytes long, but its header announces {sequences} sequences and {documents} document "
                f"boundaries: {expected} bytes; truncated or damaged"
            )
        if documents < 2 or sequences == 0:
            raise self._error("holds no documents")
        return _Header(DTYPES[code], sequences, documents, has_modes=size == expected + sequences)

    def _check_ends(self, bin_size: int) -> None:
        """The last sequence ends with the .bin, and document boundaries run from 0 to S: told before gigabytes are
        read."""
        total = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if total != bin_size:
            raise DataError(
                f"{self.bin_path}: {bin_size} bytes long, {'shorter' if bin_size < total else 'longer'} than the "
                f"{total} that {self.idx_path.name} describes: the two files do not belong together, or one was cut "
                "short"
            )
        first, last = self.document_indices[0], self.document_indices[-1]
        if first != 0 or last != len(self):
            raise self._error(f"document boundaries run from {first} to {last}, expected 0 to {len(self)}")

    def _check_sequences(self, bin_size: int) -> None:
        """Lengths non-negative, offsets their exclusive prefix sum, and no sequence beyond the .bin's end."""
        itemsize, total = self.dtype.itemsize, 0
        for start in range(0, len(self), _CHUNK):
            lengths = self.sequence_lengths[start : start + _CHUNK].astype(np.int64)
            if lengths.min() < 0:
                bad = start + int(np.argmax(lengths < 0))
                raise self._error(f"sequence {bad} has the negative length {self.sequence_lengths[bad]}")
            ends = np.cumsum(lengths * itemsize) + total
            wrong = self.sequence_pointers[start : start + _CHUNK] != ends - lengths * itemsize
            if wrong.any():
                bad = start + int(np.argmax(wrong))
                expected = int((ends - lengths * itemsize)[bad - start])
                raise self._error(f"sequence {bad} starts at byte {self.sequence_pointers[bad]}, expected {expected}")
            total = int(ends[-1])
            if total > bin_size:  # here, before a sum overflows
                bad = start + int(np.argmax(ends > bin_size))
                raise self._error(f"sequence {bad} ends behind the {bin_size} bytes of {self.bin_path.name}")

    def _check_documents(self) -> None:
        """No document boundary before the one in front of it."""
        boundaries = self.document_indices
        for start in range(0, len(boundaries) - 1, _CHUNK):
            part = boundaries[start : start + _CHUNK + 1]
            backwards = part[1:] < part[:-1]
            if backwards.any():
                bad = start + int(np.argmax(backwards))
                raise self._error(
                    f"document {bad} ends at sequence {boundaries[bad + 1]}, before it starts at {boundaries[bad]}"
                )

    def _error(self, reason: str) -> DataError:
        return DataError(f"{self.idx_path}: {reason}")


def _file_size(path: Path) -> int:
    """Bytes of a regular file; anything else is refused."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        hint = " (give the path without .bin/.idx)" if isinstance(error, FileNotFoundError) else ""
        raise DataError(f"{path}: {error.strerror or error}{hint}") from error


def _mapped(path: Path, dtype: np.dtype) -> NDArray:
    """A file as an array, which is read where it is used."""
    try:
        return np.asarray(np.memmap(path, dtype, "r"))
    except OSError as error:  # no address space is left, such as of a limit
        raise DataError(
            f"{path}: its {path.stat().st_size:,} bytes cannot be mapped into memory ({error.strerror}): raise the "
            "limit of address space (ulimit -v unlimited), or use smaller files"
        ) from error


def check_token_ids(dataset: IndexedDataset, vocab_size: int, stop: int | None = None) -> None:
    """Check that tokens `[0, stop)` of the .bin are ids of a vocabulary. Raises DataError that names the file, the
    sequence and the first id outside `[0, vocab_size)`, or a dtype without ids."""
    if dataset.dtype.kind == "f":
        raise DataError(f"{dataset.idx_path}: holds {dataset.dtype.name} values, not token ids")
    stop = dataset.num_tokens if stop is None else min(stop, dataset.num_tokens)
    for begin in range(0, stop, _SCAN):
        _require_ids(dataset, begin, dataset.tokens(begin, min(begin + _SCAN, stop)), vocab_size)


def int64_tokens(dataset: IndexedDataset, start: int, stop: int, vocab_size: int | None) -> NDArray[np.int64]:
    """int64 [stop - start]: tokens `[start, stop)` of the .bin. Raises DataError where one of them is outside the
    vocabulary, whose size is given."""
    values = dataset.tokens(start, stop).astype(np.int64)
    if vocab_size is not None:
        _require_ids(dataset, start, values, vocab_size)
    return values


def _require_ids(dataset: IndexedDataset, start: int, values: NDArray, vocab_size: int) -> None:
    """Refuse a token outside the vocabulary among those from `start` on."""
    if not len(values) or (values.max() < vocab_size and values.min() >= 0):
        return
    at = int(np.argmax((values >= vocab_size) | (values < 0)))
    # Sequences of length 0 share their start with the next one: the last that starts at or before it holds the token.
    position = (start + at) * dataset.dtype.itemsize
    sequence = int(np.searchsorted(dataset.sequence_pointers, position, side="right")) - 1
    raise DataError(
        f"{dataset.bin_path}: sequence {sequence} holds the token id {int(values[at])}, outside the vocabulary of "
        f"{vocab_size}: the dataset was made with another tokenizer"
    )
