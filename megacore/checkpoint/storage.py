"""Where the checkpoints of a run are written: a directory, or a URL of an object store.

Both publish a checkpoint in one step: a directory is renamed once it is finished; in an object store the manifest makes
the files a checkpoint (directory.py). `passing` names the points at which a save may be cut off: the tests end the
process at each of them, and the next run must find its way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

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
from megacore.checkpoint.files import TOKENIZER_DIRECTORY, Digests, FileEntry, describe
from megacore.checkpoint.tensor_file import NAMES
from megacore.checkpoint.tensor_header import header_of
from megacore.errors import StorageError
from megacore.files import naming, sync, write_all
from megacore.remote import Location, RemotePath

POINTS = (
    "begun",
    "staged",
    "shard opened",
    "shard half written",
    "shard written",
    "shard synced",
    "manifest written",
    "before the rename",
    "renamed",
    "replacement written",
    "pointer replaced",
    "retiring",
    "half retired",
    "done",
)
"""The points of a save, in order. The first one, and all after the shards, are passed only by the first rank."""

Count = Callable[[int], None]  # takes the bytes of each part that is written
_CHUNK = 1 << 24


def passing(point: str) -> None:
    """A save gets to one of POINTS. Nothing happens here; tests replace it."""


def write_tensors(path: Location, tensors: Mapping[str, Tensor], on_written: Count = lambda count: None) -> FileEntry:
    """Write one safetensors file, durably, or an object. `tensors`: in host memory. `on_written`: called with the
    number of bytes of each part that is written. Raises OSError."""
    head = memoryview(header_of({name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}))
    digests = Digests()
    with _new_file(path) as write, ThreadPoolExecutor(1) as digester:
        chunks = [head, *(chunk for tensor in tensors.values() for chunk in _chunks(tensor))]
        for number, chunk in enumerate(chunks):
            # Written and digested at once, by two threads: the slower of them is the time that a save takes.
            digested = digester.submit(digests.update, chunk)
            write(chunk)
            digested.result()
            if number > 0:
                on_written(len(chunk))
            if number < 2:
                passing(("shard opened", "shard half written")[number])
        passing("shard written")
    passing("shard synced")
    return digests.entry()


@contextlib.contextmanager
def _new_file(path: Location) -> Iterator[Callable[[memoryview], object]]:
    """What takes the parts of a new file, which is durable when the block ends well."""
    if isinstance(path, RemotePath):
        with path.writing() as write:
            yield write
        return
    with naming(path), path.open("xb", buffering=0) as file:
        yield partial(write_all, file.fileno())
        os.fsync(file.fileno())


def _chunks(tensor: Tensor) -> list[memoryview]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return [memoryview(part.numpy()) for part in flat.split(_CHUNK)]


class LocalRun:
    """Checkpoints in a directory, each under a first name until it is published under its last one. All ranks write
    files of tensors into an unfinished one (`write_tensors`); the rest is the first rank's. Every method raises
    OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> tuple[str, str]:
        """Sweep away what a killed writer has left, and begin a checkpoint: its first name and its last."""
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path)
        final = free_name(self.path, step)
        temporary = temporary_name(final)
        (self.path / temporary).mkdir()
        passing("begun")
        return temporary, final

    def write_tokenizer(self, name: str, save: Callable[[Path], None]) -> dict[str, FileEntry]:
        """Add a tokenizer, which `save` writes into a directory, to an unfinished checkpoint: its files' entries."""
        directory, files = self.path / name / TOKENIZER_DIRECTORY, {}
        save(directory)
        for path in sorted(path for path in directory.iterdir() if path.is_file()):
            sync(path)
            files[f"{TOKENIZER_DIRECTORY}/{path.name}"] = describe(path)
        sync(directory)
        return files

    def publish(self, first: str, last: str, manifest: str) -> None:
        """Add the manifest, and make the whole a checkpoint, in one step that survives a power failure."""
        temporary, final = self.path / first, self.path / last
        _write_text(temporary / MANIFEST_NAME, manifest)
        passing("manifest written")
        # The names of its files must be on the disk before its own is.
        sync(temporary)
        passing("before the rename")
        if os.path.lexists(final):
            raise FileExistsError(None, "is there already, and a checkpoint is never overwritten", str(final))
        temporary.rename(final)
        sync(final.parent)
        passing("renamed")

    def point_to(self, name: str) -> None:
        self._replace(self.path / POINTER_NAME, f"{name}\n")
        passing("pointer replaced")

    def replace_manifest(self, name: str, manifest: str) -> None:
        self._replace(self.path / name / MANIFEST_NAME, manifest)

    def _replace(self, path: Path, text: str) -> None:
        """Replace a file; what is half written lies in the run's directory, where the next writer sweeps."""
        # Not beside `path`: what is half written lies where the next writer sweeps.
        temporary = self.path / temporary_name(POINTER_NAME)
        try:
            _write_text(temporary, text)
            passing("replacement written")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)

    def retire(self, name: str) -> None:
        doomed = self.path / temporary_name(name)
        # It loses its name first, so that half of it is never taken for a whole one.
        (self.path / name).rename(doomed)
        passing("retiring")
        for path in sorted(doomed.glob("*.safetensors"))[:1]:
            path.unlink()
        passing("half retired")
        shutil.rmtree(doomed)

    def discard(self, name: str) -> None:
        """Remove an unfinished checkpoint, as far as that is possible."""
        with contextlib.suppress(OSError):
            # On a full disk it would take the last space.
            shutil.rmtree(self.path / name, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with naming(path):
        path.write_text(text, encoding="utf-8")
        sync(path)


class RemoteRun:
    """Checkpoints in an object store, as of `LocalRun`."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path

    def begin(self, step: int) -> tuple[str, str]:
        sweep(self.path)
        name = free_name(self.path, step)
        mark(self.path / name)
        passing("begun")
        return name, name

    def write_tokenizer(self, name: str, save: Callable[[Path], None]) -> dict[str, FileEntry]:
        files = {}
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / TOKENIZER_DIRECTORY
            save(directory)
            for path in sorted(path for path in directory.iterdir() if path.is_file()):
                file = f"{TOKENIZER_DIRECTORY}/{path.name}"
                (self.path / name / file).write_bytes(path.read_bytes())
                files[file] = describe(path)
        return files

    def publish(self, first: str, last: str, manifest: str) -> None:
        directory = self.path / last
        passing("before the rename")
        found = marks(directory)
        if not found:  # the next writer's sweep has taken the files, too
            raise StorageError("another run has removed this unfinished checkpoint: give each run a --save of its own")
        (directory / MANIFEST_NAME).write_bytes(manifest.encode())
        passing("manifest written")
        for one in found:
            with contextlib.suppress(OSError):  # the next writer's sweep does it
                one.unlink(missing_ok=True)
        passing("renamed")

    def point_to(self, name: str) -> None:
        (self.path / POINTER_NAME).write_bytes(f"{name}\n".encode())
        passing("pointer replaced")

    def replace_manifest(self, name: str, manifest: str) -> None:
        (self.path / name / MANIFEST_NAME).write_bytes(manifest.encode())

    def retire(self, name: str) -> None:
        mark(self.path / name)
        passing("retiring")
        (self.path / name / MANIFEST_NAME).unlink(missing_ok=True)
        passing("half retired")
        remove(self.path / name)

    def discard(self, name: str) -> None:
        with contextlib.suppress(OSError):
            if is_unfinished(self.path / name):
                remove(self.path / name)
