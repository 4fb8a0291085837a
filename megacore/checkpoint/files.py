"""Files of a checkpoint as they are read: files and nothing else, of the size and content that the manifest says. The
manifest has two digests of a file. XXH3 is what a load checks: it finds what has befallen a file, at the speed of
memory, where SHA-256 takes ten times as long as the load itself. SHA-256 is for archives and `--verify`."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from megacore.errors import CheckpointError
from megacore.files import cache_home, replace_bytes
from megacore.remote import Location, RemotePath

TOKENIZER_DIRECTORY = "tokenizer"


_CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file's size in bytes, and its SHA-256 and 128-bit XXH3 in hexadecimal; the latter may be missing."""

    bytes: int
    sha256: str
    xxh3_128: str | None = None


class Digests:
    """What a file's entry says of its content, taken as the content passes."""

    def __init__(self) -> None:
        self._bytes, self._sha256, self._xxh3 = 0, hashlib.sha256(), xxhash.xxh3_128()

    def update(self, part: bytes | memoryview) -> None:
        self._bytes += len(part)
        self._sha256.update(part)
        self._xxh3.update(part)

    def entry(self) -> FileEntry:
        return FileEntry(bytes=self._bytes, sha256=self._sha256.hexdigest(), xxh3_128=self._xxh3.hexdigest())


def open_regular(path: Location, *, buffering: int = -1) -> BinaryIO:
    """A regular file directly in its directory, open for reading: no link, no pipe, no device. Raises OSError where it
    is not."""
    if isinstance(path, RemotePath):
        return path.open()
    # O_NOFOLLOW below looks at the last name only.
    if path.parent.name == TOKENIZER_DIRECTORY and path.parent.is_symlink():
        raise OSError(None, "its directory is a symbolic link, and a checkpoint has none", str(path))
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a file"
        raise OSError(None, f"is {what}, and a checkpoint has only files", str(path))
    # Again while it is opened: it may have been replaced since lstat.
    file: BinaryIO = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=buffering)  # noqa: SIM115
    return file


def describe(path: Path) -> FileEntry:
    """Size and digests of a file as it is on the disk now."""
    digests = Digests()
    _digest(path, digests.update)
    return digests.entry()


def verify(
    path: Location,
    expected: FileEntry,
    *,
    content: bool = True,
    archived: bool = False,
    on_read: Callable[[int], None] = lambda count: None,
) -> None:
    """Refuse (CheckpointError) a file that is not what the manifest says. `content`: read it; else only its size
    counts. `archived`: take SHA-256 beside XXH3; without an XXH3 it is always taken. `on_read`: gets the bytes of each
    part."""
    digests: list[tuple[str, Any, str]] = []
    if expected.xxh3_128 is not None:
        digests.append(("XXH3", xxhash.xxh3_128(), expected.xxh3_128))
    if archived or not digests:
        digests.append(("SHA-256", hashlib.sha256(), expected.sha256))
    try:
        with open_regular(path, buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
        if content and size == expected.bytes:
            _digest(path, *(digest.update for _, digest, _ in digests), lambda part: on_read(len(part)))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: the checkpoint is incomplete") from None
    if size != expected.bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but its manifest says {expected.bytes:,}: the file is damaged"
        )
    for name, digest, recorded in digests if content else ():
        if digest.hexdigest() != recorded:
            raise CheckpointError(f"{path} does not have the {name} of its manifest: the file is damaged")


def verified_tokenizer(directory: Location, files: Mapping[str, FileEntry]) -> Path | None:
    """The directory of a checkpoint's tokenizer, whose files are all as the manifest says; None where it has none.
    Raises CheckpointError."""
    refuse_unlisted(directory, files)
    listed = [name for name in files if name.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for name in listed:
        verify(directory / name, files[name])
    if not listed:
        return None
    if isinstance(directory, RemotePath):
        return _copied(directory, {name: files[name] for name in listed})
    return directory / TOKENIZER_DIRECTORY


def _copied(directory: RemotePath, files: Mapping[str, FileEntry]) -> Path:
    """The tokenizer of a checkpoint in an object store, in a directory of this node that is named by its content."""
    key = hashlib.sha256(repr(sorted((name, entry.sha256) for name, entry in files.items())).encode()).hexdigest()[:32]
    if (home := cache_home()) is None:
        raise CheckpointError(
            f"{directory}: its tokenizer is copied, and this user has no home directory: set XDG_CACHE_HOME"
        )
    copy = home / "tokenizers" / key
    try:
        copy.mkdir(parents=True, exist_ok=True)
        for name, expected in files.items():
            path = copy / name.rpartition("/")[2]
            if not path.exists() or describe(path).sha256 != expected.sha256:
                replace_bytes(path, (directory / name).read_bytes())
                verify(path, expected, archived=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename or copy}: {error.strerror}") from None
    return copy


def refuse_unlisted(directory: Location, names: Iterable[str]) -> None:
    """Refuse files beside a checkpoint's tokenizer that are not among the manifest's `names`: they would be read
    instead of it."""
    stored = directory / TOKENIZER_DIRECTORY
    try:
        stored_names = (
            sorted(f"{TOKENIZER_DIRECTORY}/{path.name}" for path in stored.iterdir()) if stored.is_dir() else []
        )
    except OSError as error:
        raise CheckpointError(f"{stored}: {error.strerror}") from None
    if others := [name for name in stored_names if name not in set(names)]:
        raise CheckpointError(f"{directory / others[0]} is not among the files of the manifest: remove it")


def _digest(path: Location, *updates: Callable[[memoryview], None]) -> None:
    """Pass a file to all of `updates`, part by part, through memory that is reused."""
    # Reused, as fresh memory of this size comes from the system page by page.
    memory = memoryview(bytearray(_CHUNK))
    with open_regular(path, buffering=0) as file:
        while count := file.readinto(memory):  # type: ignore[attr-defined]
            for update in updates:
                update(memory[:count])
