"""The manifest: what a checkpoint directory contains, down to each file's size and SHA-256 and each tensor's pieces.

Plain JSON, read without torch: a checkpoint that cannot be used is refused before torch is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
POINTER_NAME = "latest"
TOKENIZER_DIRECTORY = "tokenizer"
_CHUNK = 1 << 22
_LARGEST = 1 << 48  # of samples, bytes, rows: more would overflow what is computed with it


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One contiguous slice of a global tensor, stored under the tensor's name in `file`."""

    file: str
    start: list[int]
    stop: list[int]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A global tensor and the pieces that tile it."""

    shape: list[int]
    dtype: str
    pieces: list[Piece]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file's size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a reader needs to know before it opens a shard.

    Attributes:
        schema: version of this format.
        step: updates done.
        consumed_samples: position in the data.
        counters: further numbers of the trainer: updates done, loss scale.
        topology: tp, pp and dp of the run that wrote it; a reader's may differ.
        config: the full resolved configuration, section by section.
        files: every other file of the directory.
        tensors: kind (`model`, `exp_avg`, ...) -> global name -> entry.
    """

    schema: int = SCHEMA
    step: int
    consumed_samples: int
    counters: dict[str, float] = field(default_factory=dict)
    topology: dict[str, int]
    config: dict[str, dict[str, Any]]
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint directory that `path` means: itself, or the last that was published in a run's output directory.

    The pointer says which was last: a later run in the same directory may have ended at an earlier step. Without a
    usable pointer it is the newest step.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    if (pointed := _pointed_to(path)) is not None:
        return pointed
    steps = sorted(d for d in path.glob("step_*") if d.name[5:].isdigit() and (d / MANIFEST_NAME).is_file())
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint: give a step_NNNNNNNN directory or a run's output directory")
    return steps[-1]


def _pointed_to(run: Path) -> Path | None:
    try:
        name = (run / POINTER_NAME).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    is_step = name.startswith("step_") and name[5:].isdigit()
    return run / name if is_step and (run / name / MANIFEST_NAME).is_file() else None


def read_manifest(directory: Path) -> Manifest:
    """Parse a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged or of another version.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        schema = _take(raw, "schema", int)
        if schema != SCHEMA:
            raise CheckpointError(f"{path}: schema {schema}, but this version reads schema {SCHEMA}")
        return Manifest(
            step=_count(raw, "step"),
            consumed_samples=_count(raw, "consumed_samples"),
            counters={name: _number(raw, "counters", name) for name in _take(raw, "counters", dict)},
            topology={name: _count(raw["topology"], name, "topology.") for name in _take(raw, "topology", dict)},
            config={name: _take(raw["config"], name, dict, "config.") for name in _take(raw, "config", dict)},
            files={_plain_name(name): _file_entry(raw["files"], name) for name in _take(raw, "files", dict)},
            tensors={kind: _table(raw["tensors"], kind) for kind in _take(raw, "tensors", dict)},
        )
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read as a manifest: {error}") from None


_KINDS = {dict: "an object", list: "a list", int: "a whole number", str: "a text"}


def _take(raw: Any, key: str, kind: type, where: str = "") -> Any:
    """`raw[key]`, which must be of a kind; `where` is the path to `raw`, for the message.

    Raises:
        ValueError: it is missing or of another kind.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{where.rstrip('.') or 'the whole'} is not an object")
    if key not in raw:
        raise ValueError(f"{where}{key} is missing")
    if not isinstance(raw[key], kind) or isinstance(raw[key], bool):
        raise ValueError(f"{where}{key} is not {_KINDS[kind]}")
    if kind is int and abs(raw[key]) > _LARGEST:
        raise ValueError(f"{where}{key} is beyond any count")
    return raw[key]


def _count(raw: Any, key: str, where: str = "") -> int:
    value: int = _take(raw, key, int, where)
    if value < 0:
        raise ValueError(f"{where}{key} is negative")
    return value


def _counts(raw: Any, key: str, where: str) -> list[int]:
    values: list[int] = _take(raw, key, list, where)
    if not all(type(value) is int and 0 <= value <= _LARGEST for value in values):
        raise ValueError(f"{where}{key} is not a list of whole numbers from 0 to {_LARGEST}")
    return values


def _number(raw: Any, table: str, name: str) -> float:
    value: Any = raw[table][name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{table}.{name} is not a number")
    return float(value)


def _file_entry(files: Any, name: str) -> FileEntry:
    entry, where = _take(files, name, dict, "files."), f"files.{name}."
    return FileEntry(bytes=_count(entry, "bytes", where), sha256=_take(entry, "sha256", str, where))


def _table(tensors: Any, kind: str) -> dict[str, TensorEntry]:
    table = _take(tensors, kind, dict, "tensors.")
    return {name: _tensor_entry(table, name, f"tensors.{kind}.") for name in table}


def _tensor_entry(table: Any, name: str, where: str) -> TensorEntry:
    entry, where = _take(table, name, dict, where), f"{where}{name}."
    shape = _counts(entry, "shape", where)
    pieces = [
        _piece(piece, len(shape), f"{where}pieces.{number}.")
        for number, piece in enumerate(_take(entry, "pieces", list, where))
    ]
    return TensorEntry(shape=shape, dtype=_take(entry, "dtype", str, where), pieces=pieces)


def _piece(raw: Any, dimensions: int, where: str) -> Piece:
    piece = Piece(
        file=_take(raw, "file", str, where), start=_counts(raw, "start", where), stop=_counts(raw, "stop", where)
    )
    if not len(piece.start) == len(piece.stop) == dimensions:
        raise ValueError(f"{where}start and stop do not have a number for each dimension of the tensor")
    return piece


def _plain_name(name: str) -> str:
    """A file name that stays inside the directory."""
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ValueError(f"it names a file outside its directory: {name!r}")
    return name


def describe(path: Path) -> FileEntry:
    """Size and SHA-256 of a file as it is on the disk now."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return FileEntry(bytes=path.stat().st_size, sha256=digest.hexdigest())


def verify(path: Path, expected: FileEntry, *, content: bool = True) -> None:
    """Refuse a file that is not what the manifest says.

    Args:
        path: the file.
        expected: what the manifest says.
        content: whether to read the file, or to compare only its size.

    Raises:
        CheckpointError: it is missing, or its size or content differs.
    """
    try:
        size = path.stat().st_size
        found = describe(path) if content and size == expected.bytes else None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the checkpoint is incomplete") from None
    if size != expected.bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but its manifest says {expected.bytes:,}: the file is damaged"
        )
    if content and found != expected:
        raise CheckpointError(f"{path} does not have the SHA-256 of its manifest: the file is damaged")
