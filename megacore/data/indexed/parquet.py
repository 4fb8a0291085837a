"""Parquet files as JSON lines, for the tools that read those; pyarrow is needed for nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megacore.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet

SUFFIX = ".parquet"
_ROWS = 64  # of a batch, which is in memory as a whole


class Rows(NamedTuple):
    """Consecutive rows of a file.

    Attributes:
        first: number of the first one, from 1.
        lines: a JSON object for each row, with a key for each column, and a line feed after each; UTF-8.
        file_bytes: how many bytes of the file they count for in reports of progress, in proportion to its rows.
    """

    first: int
    lines: bytes
    file_bytes: int


def is_parquet(path: str | Path) -> bool:
    """Whether a file is Parquet, by its name."""
    return Path(path).suffix == SUFFIX


def read_rows(path: str, columns: Sequence[str] | None, most_bytes: int) -> Iterator[Rows]:
    """The rows of a file, in pieces that end with the row that reaches `most_bytes`.

    Args:
        path: the file.
        columns: those to read; None: all.
        most_bytes: of the lines of a piece.

    Raises:
        DataError: pyarrow is not installed, the file is damaged, or a column is missing.
    """
    file, broken = _opened(path, columns)
    total, size = max(file.metadata.num_rows, 1), os.path.getsize(path)
    first, lines, length, reported = 1, list[bytes](), 0, 0
    try:
        for batch in file.iter_batches(batch_size=_ROWS, columns=None if columns is None else list(columns)):
            for row in batch.to_pylist():
                lines.append(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))
                length += len(lines[-1]) + 1
                if length >= most_bytes:
                    done = size * (first - 1 + len(lines)) // total
                    yield Rows(first, b"\n".join(lines) + b"\n", done - reported)
                    first, lines, length, reported = first + len(lines), [], 0, done
    except broken as error:
        raise DataError(f"{path}: cannot be read to its end ({str(error)[:200]}): damaged or cut short") from error
    if lines:
        yield Rows(first, b"\n".join(lines) + b"\n", size - reported)


def check_parquet(path: str, columns: Sequence[str] | None) -> None:
    """Look at the end of a file, where its columns are.

    Raises:
        DataError: as by `read_rows`.
    """
    _opened(path, columns)


def _opened(
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
