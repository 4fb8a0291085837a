"""Where the checkpoints of a run are written: a directory, or a URL of an object store; a small interface for both.

Both publish a checkpoint in one step. In a directory that is the renaming of a finished one. An object store cannot
rename: there the files lie under the checkpoint's name, marked as unfinished (directory.py), and its manifest, which is
written last and whole, and has the digests of all other files and of itself, makes them a checkpoint.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megacore.checkpoint import storage
from megacore.checkpoint.directory import (
    MANIFEST_NAME,
    POINTER_NAME,
    free_name,
    is_unfinished,
    mark,
    marks,
    remove,
    sweep,
    temporary_name,
)
from megacore.checkpoint.files import TOKENIZER_DIRECTORY, FileEntry, describe
from megacore.errors import StorageError
from megacore.files import sync
from megacore.remote import Location, RemotePath, location


class Run(Protocol):
    """Writes checkpoints, each under a first name until it is published under its last one. All ranks write files of
    tensors into an unfinished one (storage.py); the rest is the first rank's.

    Every method raises OSError for what cannot be written.
    """

    @property
    def path(self) -> Location:
        """The directory of all checkpoints of the run."""
        ...

    def begin(self, step: int) -> tuple[str, str]:
        """Sweep away what a killed writer has left, and begin a checkpoint: its first name and its last."""
        ...

    def write_tokenizer(self, name: str, save: Callable[[Path], None]) -> dict[str, FileEntry]:
        """Add a tokenizer to an unfinished checkpoint; returns the entries of its files.

        Args:
            name: of the checkpoint.
            save: writes the files into a directory.
        """
        ...

    def publish(self, first: str, last: str, manifest: str) -> None:
        """Add the manifest, and make the whole a checkpoint, in one step."""
        ...

    def point_to(self, name: str) -> None:
        """Make the run's pointer name this checkpoint."""
        ...

    def replace_manifest(self, name: str, manifest: str) -> None:
        """Give a checkpoint another manifest, in one step."""
        ...

    def retire(self, name: str) -> None:
        """Delete a checkpoint; half of it is never taken for a whole one."""
        ...

    def discard(self, name: str) -> None:
        """Remove an unfinished checkpoint, as far as that is possible."""
        ...


def run_at(directory: str) -> Run:
    """The checkpoints of a run, by the path or URL of their directory."""
    path = location(directory)
    return RemoteRun(path) if isinstance(path, RemotePath) else LocalRun(path)


class LocalRun:
    """Checkpoints in a directory.

    Args:
        path: of the directory, which is made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> tuple[str, str]:
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path)
        final = free_name(self.path, step)
        temporary = temporary_name(final)
        (self.path / temporary).mkdir()
        storage.passing("begun")
        return temporary, final

    def write_tokenizer(self, name: str, save: Callable[[Path], None]) -> dict[str, FileEntry]:
        directory = self.path / name / TOKENIZER_DIRECTORY
        save(directory)
        files = {f"{TOKENIZER_DIRECTORY}/{path.name}": storage.seal(path) for path in _files(directory)}
        sync(directory)
        return files

    def publish(self, first: str, last: str, manifest: str) -> None:
        storage.write_text(self.path / first / MANIFEST_NAME, manifest)
        storage.passing("manifest written")
        storage.publish(self.path / first, self.path / last)

    def point_to(self, name: str) -> None:
        storage.point_to(self.path / name)

    def replace_manifest(self, name: str, manifest: str) -> None:
        storage.replace_manifest(self.path / name, manifest)

    def retire(self, name: str) -> None:
        storage.retire(self.path / name)

    def discard(self, name: str) -> None:
        storage.discard(self.path / name)


class RemoteRun:
    """Checkpoints in an object store.

    Args:
        path: where they are.
    """

    def __init__(self, path: RemotePath) -> None:
        self.path = path

    def begin(self, step: int) -> tuple[str, str]:
        sweep(self.path)
        name = free_name(self.path, step)
        mark(self.path / name)
        storage.passing("begun")
        return name, name

    def write_tokenizer(self, name: str, save: Callable[[Path], None]) -> dict[str, FileEntry]:
        files = {}
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / TOKENIZER_DIRECTORY
            save(directory)
            for path in _files(directory):
                file = f"{TOKENIZER_DIRECTORY}/{path.name}"
                (self.path / name / file).write_bytes(path.read_bytes())
                files[file] = describe(path)
        return files

    def publish(self, first: str, last: str, manifest: str) -> None:
        directory = self.path / last
        storage.passing("before the rename")
        found = marks(directory)
        if not found:  # the next writer's sweep has taken the files, too
            raise StorageError("another run has removed this unfinished checkpoint: give each run a --save of its own")
        (directory / MANIFEST_NAME).write_bytes(manifest.encode())
        storage.passing("manifest written")
        for one in found:
            with contextlib.suppress(OSError):  # the next writer's sweep does it
                one.unlink(missing_ok=True)
        storage.passing("renamed")

    def point_to(self, name: str) -> None:
        (self.path / POINTER_NAME).write_bytes(f"{name}\n".encode())
        storage.passing("pointer replaced")

    def replace_manifest(self, name: str, manifest: str) -> None:
        (self.path / name / MANIFEST_NAME).write_bytes(manifest.encode())

    def retire(self, name: str) -> None:
        mark(self.path / name)
        storage.passing("retiring")
        (self.path / name / MANIFEST_NAME).unlink(missing_ok=True)
        storage.passing("half retired")
        remove(self.path / name)

    def discard(self, name: str) -> None:
        with contextlib.suppress(OSError):
            if is_unfinished(self.path / name):
                remove(self.path / name)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())
