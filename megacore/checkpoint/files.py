"""Files of a checkpoint as they are read: files and nothing else, of the size and content that the manifest says."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from megacore.errors import CheckpointError

TOKENIZER_DIRECTORY = "tokenizer"
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file's size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def open_regular(path: Path) -> int:
    """A descriptor of a file that is one, in its own directory: no link, no pipe, no device.

    Raises:
        OSError: it is not.
    """
    if path.parent.name == TOKENIZER_DIRECTORY and path.parent.is_symlink():
        raise OSError(None, "its directory is a symbolic link, and a checkpoint has none", str(path))
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a file"
        raise OSError(None, f"is {what}, and a checkpoint has files alone", str(path))
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def describe(path: Path) -> FileEntry:
    """Size and SHA-256 of a file as it is on the disk now."""
    digest, size = hashlib.sha256(), 0
    with open(open_regular(path), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(bytes=size, sha256=digest.hexdigest())


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
        os.close(open_regular(path))
        size = path.lstat().st_size
        found = describe(path) if content and size == expected.bytes else None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: the checkpoint is incomplete") from None
    if size != expected.bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but its manifest says {expected.bytes:,}: the file is damaged"
        )
    if content and found != expected:
        raise CheckpointError(f"{path} does not have the SHA-256 of its manifest: the file is damaged")
