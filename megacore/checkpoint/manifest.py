"""The manifest: what a checkpoint directory contains, down to each file's size and SHA-256 and each tensor's pieces.

Plain JSON, read without torch: a checkpoint that cannot be used is refused before torch is loaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
POINTER_NAME = "latest"
_CHUNK = 1 << 22


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
        if raw["schema"] != SCHEMA:
            raise CheckpointError(f"{path}: schema {raw['schema']}, but this version reads schema {SCHEMA}")
        if not all(isinstance(section, dict) for section in raw["config"].values()):
            raise ValueError("its configuration is not made of sections")
        raw["files"] = {_plain_name(name, path): _file_entry(entry) for name, entry in raw["files"].items()}
        raw["tensors"] = {
            kind: {name: _tensor_entry(entry) for name, entry in table.items()}
            for kind, table in raw["tensors"].items()
        }
        return Manifest(**raw)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read as a manifest: {error}") from None


def _file_entry(raw: dict[str, Any]) -> FileEntry:
    return FileEntry(bytes=int(raw["bytes"]), sha256=str(raw["sha256"]))


def _tensor_entry(raw: dict[str, Any]) -> TensorEntry:
    return TensorEntry(shape=raw["shape"], dtype=raw["dtype"], pieces=[Piece(**piece) for piece in raw["pieces"]])


def _plain_name(name: str, path: Path) -> str:
    """A file name that stays inside the directory."""
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise CheckpointError(f"{path} names a file outside its directory: {name!r}")
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
