"""Writing and merging .bin/.idx pairs: streamed, exact beyond 2^31 tokens, and never visible half-finished. Everything
is written under `*.partial` names, synced, and renamed at `commit`."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megacore.data.indexed.reader import HEADER, MAGIC, VERSION, IndexedDataset, bin_path, dtype_code, idx_path
from megacore.data.indexed.sidecar import Sidecar, loss_mask_prefix, open_loss_mask, read_sidecar, sidecar_path
from megacore.errors import DataError
from megacore.files import naming, sync, take_lock

_PARTIAL = ".partial"
_CHUNK = 1 << 20
_COPY = 1 << 24


class IndexedWriter:
    """Writes one .bin/.idx pair; nothing appears under the final names before `commit`. A context manager: without a
    commit what was written is removed."""

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = dtype_code(self.dtype)
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self._begun = 0  # tokens of a sequence that is not complete
        self.max_token_id = -1
        self._last_boundary = 0
        self._published = False
        folder = Path(self.prefix).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._partial = Path(f"{self.prefix}.bin{_PARTIAL}")
            self._bin = _open_locked(self._partial)
            # What is known only at the end lies in unnamed files: memory does not grow with the corpus, and nothing is
            # left.
            self._lengths: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in close()
            self._boundaries: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot write there ({error.strerror})") from error
        self._boundaries.write(np.zeros(1, "<i8").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin_sequence(self, tokens: NDArray) -> None:
        """Append the first tokens of a sequence, or the next ones, which `extend` completes. `tokens`: [tokens] of the
        writer's dtype."""
        assert tokens.dtype == self.dtype
        with naming(self._partial):
            self._bin.write(np.ascontiguousarray(tokens).data)
        self._begun += tokens.size
        self.num_tokens += tokens.size
        if tokens.size:
            self.max_token_id = max(self.max_token_id, int(tokens.max()))

    def extend(self, tokens: NDArray, lengths: NDArray, document_sizes: NDArray) -> None:
        """Append many sequences at once: `tokens` [sum(lengths)] of the writer's dtype. The first of `lengths` counts
        the tokens of `begin_sequence`; the first of `document_sizes`, in sequences, continues the current document."""
        assert int(lengths.sum()) == self._begun + tokens.size
        self.begin_sequence(tokens)
        self._begun = 0
        # Sequences that no document ends yet belong to the first one that ends here.
        ends = self.num_sequences + np.cumsum(document_sizes, dtype=np.int64)
        with naming(self._partial):
            self._lengths.write(lengths.astype("<i4").tobytes())
            self._boundaries.write(ends.astype("<i8").tobytes())
        if document_sizes.size:
            self.num_documents += document_sizes.size
            self._last_boundary = int(ends[-1])
        self.num_sequences += lengths.size

    def append(self, dataset: IndexedDataset) -> None:
        """Append all documents of another dataset of the same dtype, holes of sparse files included."""
        assert dataset.dtype == self.dtype
        with naming(self._partial), open(dataset.bin_path, "rb") as source:
            self._bin.flush()
            _copy_sparse(source, self._bin.fileno(), self.num_tokens * self.dtype.itemsize)
            # The copy was written at an offset, beside the position of the file object.
            self._bin.seek(0, os.SEEK_END)
            for start in range(0, len(dataset), _CHUNK):
                self._lengths.write(dataset.sequence_lengths[start : start + _CHUNK].tobytes())
            # Its first boundary, 0, is the last one of what is there already.
            for start in range(1, len(dataset.document_indices), _CHUNK):
                part = dataset.document_indices[start : start + _CHUNK] + np.int64(self.num_sequences)
                self._boundaries.write(part.tobytes())
        self.num_sequences += len(dataset)
        self._last_boundary = self.num_sequences
        self.num_documents += dataset.num_documents
        self.num_tokens += dataset.num_tokens

    def commit(self, sidecar: Sidecar | None = None) -> None:
        """Sync everything and give it its final name; a dataset that was there before is replaced. Raises DataError
        where nothing was written, or sequences are left that no document ends."""
        if self.num_documents == 0:
            raise DataError(f"{self.prefix}: no documents to write")
        assert self._last_boundary == self.num_sequences, "sequences that no document ends"
        index, note = Path(f"{self.prefix}.idx{_PARTIAL}"), Path(f"{self.prefix}.json{_PARTIAL}")
        try:
            with naming(self._partial):
                _sync(self._bin)
            with naming(index), open(index, "wb") as file:
                self._write_index(file)
                _sync(file)
            if sidecar is not None:
                with naming(note), open(note, "wb") as file:
                    file.write(sidecar.to_bytes())
                    _sync(file)
            # The old .idx goes first and the new one comes last, so that the parts never mix.
            idx_path(self.prefix).unlink(missing_ok=True)
            sidecar_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._partial, bin_path(self.prefix))
            self._published = True
            if sidecar is not None:
                os.replace(note, sidecar_path(self.prefix))
            os.replace(index, idx_path(self.prefix))
            sync(idx_path(self.prefix).parent)
        finally:
            index.unlink(missing_ok=True)
            note.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Remove what was not committed and release the files."""
        if self._bin.closed:
            return
        if not self._published:
            self._partial.unlink(missing_ok=True)
        for file in (self._bin, self._lengths, self._boundaries):
            with contextlib.suppress(OSError):  # what is still buffered of a dataset that is discarded
                file.close()

    def _write_index(self, file: BinaryIO) -> None:
        file.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))
        for block in _blocks(self._lengths):
            file.write(block)
        offset = 0
        for block in _blocks(self._lengths):
            sizes = np.frombuffer(block, "<i4").astype(np.int64) * self.dtype.itemsize
            ends = np.cumsum(sizes) + offset
            file.write((ends - sizes).astype("<i8").tobytes())
            offset = int(ends[-1])
        for block in _blocks(self._boundaries):
            file.write(block)


def require_prefix(prefix: str) -> None:
    """Refuse an empty output prefix, mostly a shell variable that is not set. Raises DataError where it is empty."""
    if not prefix.strip():
        raise DataError("--output-prefix is empty: give a path without an ending, such as data/corpus")


def output_files(prefix: str | Path) -> list[Path]:
    """Every file that writing a dataset replaces or removes."""
    ends = (".bin", ".idx", ".json")
    return [Path(f"{prefix}{end}{partial}") for end in ends for partial in ("", _PARTIAL)]


def refuse_overwriting(outputs: Iterable[Path], inputs: Iterable[str | Path]) -> None:
    """Refuse (DataError) to write over what is read, under whatever name."""
    read = [Path(path) for path in inputs if os.path.exists(path)]
    for output in outputs:
        target = Path(os.path.realpath(output))  # new/../a: `new` will be made
        if target.exists() and any(target.samefile(path) for path in read):
            raise DataError(f"{output} would be overwritten, but is one of the inputs: choose another output name")


def merge(
    prefixes: Sequence[str], output_prefix: str, *, on_copied: Callable[[int], None] = lambda count: None
) -> Sidecar | None:
    """Concatenate datasets of one dtype, and their loss masks if they have them. `on_copied`: called with the bytes of
    each input's tokens. Returns the sidecar that was written: only when every input has one, all made with the same
    tokenizer. Raises DataError where an input is damaged, dtypes or tokenizers differ, or the output is one of the
    inputs."""
    require_prefix(output_prefix)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    masks = [mask for dataset in datasets if (mask := open_loss_mask(dataset)) is not None]
    mask_prefix = loss_mask_prefix(output_prefix)
    outputs = [*output_files(output_prefix), *(output_files(mask_prefix) if masks else [])]
    refuse_overwriting(outputs, [p for d in [*datasets, *masks] for p in (d.idx_path, d.bin_path)])
    if masks and len(masks) < len(datasets):
        raise DataError(
            f"{masks[0].prefix} is a loss mask, but only {len(masks)} of the {len(datasets)} inputs have one: "
            "merge those with and those without separately, and mix them with --data-path"
        )
    first = datasets[0]
    for dataset in datasets:
        if dataset.sequence_modes is not None:
            raise DataError(f"{dataset.idx_path}: a multimodal dataset; only text can be merged")
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{dataset.idx_path} holds {dataset.dtype.name} tokens but {first.idx_path} holds {first.dtype.name}: "
                "only datasets of one dtype (one tokenizer) can be merged"
            )
    notes = [read_sidecar(dataset) for dataset in datasets]
    known = [note for note in notes if note is not None]
    ids = {note.tokenizer_ids for note in known}
    if len({note.tokenizer_fingerprint for note in known}) > 1 and (len(ids) > 1 or None in ids):
        raise DataError("the inputs were made with different tokenizers: " + ", ".join(map(str, prefixes)))
    with IndexedWriter(output_prefix, first.dtype) as writer:
        for dataset in datasets:
            writer.append(dataset)
            on_copied(dataset.bin_path.stat().st_size)
        total = Sidecar.total(known) if len(known) == len(datasets) else None
        if masks:  # before the tokens, which would otherwise all be predicted
            with IndexedWriter(mask_prefix, masks[0].dtype) as mask_writer:
                for mask in masks:
                    mask_writer.append(mask)
                mask_writer.commit()
        writer.commit(total)
    return total


def _open_locked(path: Path) -> BinaryIO:
    """Open a partial file as its only writer: a leftover of a killed run is emptied, a live writer's is refused."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            take_lock(file.fileno())  # without locks, keeping two writers apart is the user's affair
        except BlockingIOError:
            file.close()
            raise DataError(f"{path}: another process is writing this dataset") from None
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            file.truncate(0)
            return file
        file.close()  # its former owner renamed it between our opening and our lock


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _blocks(spool: BinaryIO) -> Iterator[bytes]:
    """What was written to a file, from its beginning."""
    spool.flush()
    spool.seek(0)
    return iter(lambda: spool.read(8 * _CHUNK), b"")


def _copy_sparse(file: BinaryIO, target: int, offset: int) -> None:
    """Copy a whole file to an offset of another; holes stay holes."""
    source = file.fileno()
    size = os.fstat(source).st_size
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
            stop = os.lseek(source, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        while start < stop:
            data = os.pread(source, min(_COPY, stop - start), start)
            if not data:
                raise OSError(errno.EIO, "the dataset became shorter while it was read", file.name)
            start += os.pwrite(target, data, offset + start)  # on a disk that is nearly full, a part of it
        position = stop
    # A hole at the end has not been written.
    os.ftruncate(target, offset + size)
