"""Files of a checkpoint: written durably, and published as a directory in one step.

A shard is written and digested in one pass, each piece of it by two threads at once. `passing` names the points at
which a save may be cut off: the tests end the process at each of them, and the next run must find its way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.directory import MANIFEST_NAME, POINTER_NAME, temporary_name
from megacore.checkpoint.files import Digests, FileEntry, describe
from megacore.checkpoint.tensor_file import NAMES
from megacore.checkpoint.tensor_header import header_of
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
    """Write one safetensors file and make it durable, or write an object of an object store.

    Args:
        path: of the new file.
        tensors: in host memory.
        on_written: called with the number of bytes of each part of a tensor that is written.

    Raises:
        OSError: it cannot be written.
    """
    head = memoryview(header_of({name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}))
    digests = Digests()
    with _new_file(path) as write, ThreadPoolExecutor(1) as digester:
        chunks = [head, *(chunk for tensor in tensors.values() for chunk in _chunks(tensor))]
        for number, chunk in enumerate(chunks):
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


def write_text(path: Path, text: str) -> FileEntry:
    """Write one text file and make it durable."""
    with naming(path):
        path.write_text(text, encoding="utf-8")
        return seal(path)


def seal(path: Path) -> FileEntry:
    """Flush a file to the disk, and describe it."""
    sync(path)
    return describe(path)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, which nothing has yet, in one step that survives a power failure.

    Raises:
        OSError: it cannot be renamed, or the name is taken.
    """
    sync(temporary)
    passing("before the rename")
    if os.path.lexists(final):
        raise FileExistsError(None, "is there already, and a checkpoint is never overwritten", str(final))
    temporary.rename(final)
    sync(final.parent)
    passing("renamed")


def point_to(directory: Path) -> None:
    """Make the run's pointer name this checkpoint, in one step."""
    _replace(directory.parent / POINTER_NAME, f"{directory.name}\n", directory.parent)
    passing("pointer replaced")


def replace_manifest(directory: Path, manifest: str) -> None:
    """Give a checkpoint another manifest, in one step."""
    _replace(directory / MANIFEST_NAME, manifest, directory.parent)


def _replace(path: Path, text: str, run: Path) -> None:
    """Replace a file of a run; what is half written lies in the run's directory, where the next writer sweeps."""
    temporary = run / temporary_name(POINTER_NAME)
    try:
        write_text(temporary, text)
        passing("replacement written")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def retire(directory: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that half of it is never taken for a whole one."""
    doomed = directory.with_name(temporary_name(directory.name))
    directory.rename(doomed)
    passing("retiring")
    for path in sorted(doomed.glob("*.safetensors"))[:1]:
        path.unlink()
    passing("half retired")
    shutil.rmtree(doomed)


def discard(temporary: Path) -> None:
    """Remove an unfinished checkpoint, as far as that is possible: it would take a full disk's last space."""
    with contextlib.suppress(OSError):
        shutil.rmtree(temporary, ignore_errors=True)
