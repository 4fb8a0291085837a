"""Files of a checkpoint: written durably, and published as a directory in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megacore.checkpoint.manifest import POINTER_NAME, FileEntry, describe


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write one safetensors file and make it durable.

    Raises:
        OSError: it cannot be written; safetensors has an error of its own for that.
    """
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from error
    return seal(path)


def write_text(path: Path, text: str) -> FileEntry:
    """Write one text file and make it durable."""
    path.write_text(text, encoding="utf-8")
    return seal(path)


def seal(path: Path) -> FileEntry:
    """Flush a file to the disk, and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return describe(path)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name. An older one of that name is moved away first and deleted last."""
    _sync_directory(temporary)
    replaced = final.with_name(f"{final.name}.replaced-{os.getpid()}")
    if final.exists():
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(directory: Path) -> None:
    """Make the run's pointer name this checkpoint, in one step."""
    pointer = directory.parent / POINTER_NAME
    temporary = pointer.with_name(f"{POINTER_NAME}.tmp-{os.getpid()}")
    try:
        write_text(temporary, f"{directory.name}\n")
        os.replace(temporary, pointer)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
