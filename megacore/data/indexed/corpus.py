"""Text files (plain or JSON lines, also as .gz or .zst, and Parquet) in pieces of bounded size that end where a
document ends. Pieces depend only on the input, not on the number of workers."""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import zstandard

from megacore.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet

    from megacore.data.indexed.long_lines import LongLine

TextUnit = Literal["line", "paragraph", "file"]
CHUNK_BYTES = 1 << 20
BLOCK = 1 << 18
_PLAIN_BLOCK = 1 << 16  # of a file as it is: malloc keeps memory of this size, and asks the system for larger ones
MOST_DOCUMENT_BYTES = 1 << 25
"""Of one document that is tokenized at once, which takes up to 200 bytes of memory per byte."""
MOST_DIVIDED_BYTES = 1 << 30
"""Of one document that is tokenized in parts: a long JSON line through a temporary file, another document with up to 10
bytes of memory per byte."""
LONG_LINE_BYTES = 1 << 23
"""Of a JSON line that goes through a temporary file."""
PIPE_SECONDS = 10
"""That a pipe may be without a writer, which a script starts beside the reader."""
_WAYS_OUT = {
    "json": "split it over several lines",
    "line": "split the line, or use --text-unit paragraph if blank lines separate documents",
    "paragraph": "separate its parts by blank lines, or use --text-unit line",
    "file": "use --text-unit paragraph or line, or smaller files",
}
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_PARQUET = ".parquet"  # its rows are JSON lines; pyarrow is needed for nothing else
_ROWS = 64  # of a batch, which is in memory as a whole
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes of a file on disk."""

    path: str  # of the file, without links
    identity: tuple[int, int]  # device and inode of the file
    begin: int  # of the bytes
    size: int  # number of bytes

    def read(self) -> bytes:
        """The bytes. Raises DataError where the file was removed, replaced or cut since."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                same = _identity(file) == self.identity
                data = os.pread(file.fileno(), self.size, self.begin)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read to its end ({error})") from error
        if not same or len(data) < self.size:
            raise DataError(f"{self.path} was replaced or cut while it was read: start again")
        return data


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Whole documents of one file."""

    source: str  # path of the file
    first_line: int  # number of the first line in the file, from 1; of Parquet, of the first row
    data: bytes  # the bytes, after decompression
    # What a document is: a JSON object a line, or a unit of plain text.
    unit: Literal["json", "line", "paragraph", "file"]
    file_bytes: int  # bytes of the file on disk that were read for this chunk
    long: LongLine | None = None  # the one line of the chunk, instead of data, if it is long
    place: Place | None = None  # where the data can be read, instead of data

    @property
    def size(self) -> int:
        held = self.long or self.place
        return len(self.data) if held is None else held.size

    def loaded(self) -> Chunk:
        """The chunk with its data, if that is still in the file."""
        return self if self.place is None else replace(self, data=self.place.read(), place=None)


def check_files(paths: Sequence[str], columns: Sequence[str] | None = None, *, read_again: bool = False) -> int:
    """Open every input once, so that a wrong name is reported before hours of work; their bytes on disk, summed.
    `read_again`: they are read more than once, which no pipe can be. Raises DataError."""
    total = 0
    for path in paths:
        if Path(path).is_dir():
            raise DataError(f"--input {path} is a directory: give the files in it, {path}/*")
        try:
            if Path(path).is_fifo():  # opening and closing it would end whoever writes to it
                if read_again or Path(path).suffix == _PARQUET:
                    raise DataError(f"--input {path} is a pipe, which can be read only once: write it to a file first")
                continue
            with open(path, "rb") as file:
                total += os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"--input {path} cannot be read: {error.strerror}") from error
        if Path(path).suffix == _PARQUET:
            _open_parquet(path, columns)  # its end, where its columns are
    return total


def is_json(path: str | Path) -> bool:
    """Whether a file holds objects with keys, JSON lines or rows of Parquet, by its name."""
    name = Path(path)
    name = Path(name.stem) if name.suffix in (".gz", ".zst") else name
    return Path(path).suffix == _PARQUET or name.suffix in _JSON_SUFFIXES


def read_chunks(
    path: str,
    text_unit: TextUnit = "line",
    chunk_bytes: int = CHUNK_BYTES,
    most_document_bytes: int = MOST_DOCUMENT_BYTES,
    columns: Sequence[str] | None = None,
    long_line: Callable[[], LongLine] | None = None,
    long_line_bytes: int = LONG_LINE_BYTES,
    *,
    places: bool = False,
) -> Iterator[Chunk]:
    """A file as chunks of about `chunk_bytes`, more where one document is longer.

    Args:
        columns: that are read of a Parquet file; None: all.
        long_line: makes what keeps a long JSON line, which the caller closes; None: such lines are held in memory.
        places: whether chunks of a file that is neither compressed nor a pipe have a place instead of data.

    Raises:
        DataError: the file cannot be read, its compressed data is damaged or cut short, or a document is too long.
    """
    if Path(path).suffix == _PARQUET:
        yield from _chunks_of_rows(path, columns, chunk_bytes, most_document_bytes)
        return
    unit = "json" if is_json(path) else text_unit
    line, seen, first = 1, 0, True
    pending = bytearray()
    long: LongLine | None = None  # what is being read, up to the next newline
    with _open_pipe(path) if Path(path).is_fifo() else open(path, "rb") as file:
        place = _whole(path, file) if places else None
        for block in _blocks(path, file):
            if long is not None:
                end = block.find(b"\n") + 1
                long.write(block[: end or len(block)])
                if long.size > most_document_bytes:
                    long.close()
                    raise _too_long(f"{path}:{line}", most_document_bytes, unit)
                if not end:
                    continue
                pending += block[end:]
                seen, before = _position(file), seen
                place = _behind(place, long.size)
                yield Chunk(source=path, first_line=line, data=b"", unit="json", file_bytes=seen - before, long=long)
                line, long = line + 1, None
                continue
            searched = max(0, len(pending) - BLOCK)
            pending += block
            if first:
                if len(pending) < len(_BOM):
                    continue
                first = False
                if pending.startswith(_BOM):
                    del pending[: len(_BOM)]
                    place = _behind(place, len(_BOM))
            if len(pending) < chunk_bytes:
                continue
            cut = 0 if unit == "file" else _last_boundary(pending, unit, searched)
            # Refused while it is read: a file without line breaks must not fill the memory first.
            if not cut and len(pending) > most_document_bytes:
                raise _too_long(f"{path}:{line}", most_document_bytes, unit)
            if not cut and unit == "json" and long_line is not None and len(pending) > long_line_bytes:
                long = long_line()
                long.write(pending)
                pending.clear()
            if cut:
                data = b"" if place else bytes(pending[:cut])
                lines = pending.count(b"\n", 0, cut)
                del pending[:cut]
                seen, before = _position(file), seen
                chunk = Chunk(source=path, first_line=line, data=data, unit=unit, file_bytes=seen - before)
                yield replace(chunk, place=replace(place, size=cut)) if place else chunk
                place = _behind(place, cut)
                line += lines
        if long is not None:
            size = _position(file) - seen
            yield Chunk(source=path, first_line=line, data=b"", unit="json", file_bytes=size, long=long)
        if pending:
            yield Chunk(source=path, first_line=line, data=bytes(pending), unit=unit, file_bytes=_position(file) - seen)


def _open_pipe(path: str) -> BufferedReader:
    """Open a pipe for reading, as soon as something has it open for writing. Raises DataError where nothing does within
    seconds: open would wait for ever."""
    opened: Future[int] = Future()

    def wait() -> None:
        try:
            opened.set_result(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            opened.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    try:
        return os.fdopen(opened.result(PIPE_SECONDS), "rb")
    except TimeoutError:
        raise DataError(
            f"{path} is a pipe, and nothing has opened it for writing in {PIPE_SECONDS} s: start the program that "
            "writes to it first, or give a file"
        ) from None


def _chunks_of_rows(
    path: str, columns: Sequence[str] | None, chunk_bytes: int, most_document_bytes: int
) -> Iterator[Chunk]:
    """The rows of a Parquet file as JSON lines, in pieces that end with the row that reaches `chunk_bytes`; bytes of
    the file are counted in proportion to its rows."""
    file, broken = _open_parquet(path, columns)
    total, size = max(file.metadata.num_rows, 1), os.path.getsize(path)
    first, lines, length, reported = 1, list[bytes](), 0, 0

    def chunk(done: int) -> Chunk:
        if length > chunk_bytes + most_document_bytes:  # the last row is that long
            raise _too_long(f"{path}:{first + len(lines) - 1}", most_document_bytes, "json")
        data = b"\n".join(lines) + b"\n"
        return Chunk(source=path, first_line=first, data=data, unit="json", file_bytes=done - reported)

    try:
        for batch in file.iter_batches(batch_size=_ROWS, columns=None if columns is None else list(columns)):
            for row in batch.to_pylist():
                lines.append(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))
                length += len(lines[-1]) + 1
                if length >= chunk_bytes:
                    done = size * (first - 1 + len(lines)) // total
                    yield chunk(done)
                    first, lines, length, reported = first + len(lines), [], 0, done
    except broken as error:
        raise DataError(f"{path}: cannot be read to its end ({str(error)[:200]}): damaged or cut short") from error
    if lines:
        yield chunk(size)


def _open_parquet(
    path: str, columns: Sequence[str] | None
) -> tuple[pyarrow.parquet.ParquetFile, tuple[type[Exception], ...]]:
    """The file, and what reading it may raise."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"--input {path}: a Parquet file is read with pyarrow, which is not installed: pip install pyarrow, or "
            "give .jsonl"
        ) from error
    broken = (pyarrow.ArrowException, OSError)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except broken as error:
        raise DataError(f"--input {path} is no Parquet file, or is cut short ({str(error)[:200]})") from error
    there = file.schema_arrow.names
    if missing := [name for name in columns or () if name not in there]:
        raise DataError(
            f"--input {path} has no column {' and no column '.join(map(repr, missing))}: use --json-keys with some of "
            f"{', '.join(map(repr, there[:10]))}"
        )
    return file, broken


def _too_long(where: str, most_document_bytes: int, unit: str) -> DataError:
    return DataError(
        f"{where}: the document that begins here has more than {most_document_bytes:,} bytes, and would take too much "
        f"memory: {_WAYS_OUT[unit]}"
    )


def _whole(path: str, file: BufferedReader) -> Place | None:
    """The place of a file's bytes; None if they cannot be read again."""
    if Path(path).suffix in (".gz", ".zst") or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    place = Place(path=os.path.realpath(path), identity=_identity(file), begin=0, size=0)
    try:
        place.read()
    except DataError:  # the name of an open file that has no other, such as /dev/stdin
        return None
    return place


def _identity(file: BufferedReader | FileIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _behind(place: Place | None, size: int) -> Place | None:
    """The place that begins some bytes later."""
    return place and replace(place, begin=place.begin + size)


def _position(file: BinaryIO) -> int:
    """Bytes of the file on disk that have been read."""
    return file.tell() if file.seekable() else 0


def _last_boundary(data: bytearray, unit: str, searched: int) -> int:
    """End of the last whole document in data, looking only behind `searched`; 0 if there is none."""
    if unit != "paragraph":
        # A newline byte and nothing else ends a line: str.splitlines would also cut at form feeds and U+2028.
        return data.rfind(b"\n", searched) + 1
    end = 0
    for match in _BLANK_LINE.finditer(data, searched):
        end = match.end()
    return end


def _blocks(path: str, file: BufferedReader) -> Iterator[bytes]:
    """The file's content in blocks, decompressed by its suffix."""
    suffix = Path(path).suffix
    try:
        if suffix == ".gz":
            with gzip.open(file, "rb") as unpacked:
                yield from iter(lambda: unpacked.read(BLOCK), b"")
        elif suffix == ".zst":
            yield from _zstd_blocks(file)
        else:
            # One system call at a time: between two of them Python sees a Ctrl-C that came while a pipe was slow.
            yield from iter(lambda: file.read1(_PLAIN_BLOCK), b"")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read to its end ({error}): damaged or cut short") from error


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames; zstandard's stream reader takes a cut-off file for a complete one."""
    compressed = b""
    decompressor = None
    while compressed or (compressed := file.read(BLOCK // 4)):
        if decompressor is None:
            # The window of `zstd --long=31`; by default larger ones than 128 MiB are refused.
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        yield decompressor.decompress(compressed)
        compressed = decompressor.unused_data if decompressor.eof else b""
        if decompressor.eof:
            decompressor = None
    if decompressor is not None:
        raise EOFError("the last frame is not complete")
