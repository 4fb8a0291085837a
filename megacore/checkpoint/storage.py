"""Files of a checkpoint: written durably, and published as a directory in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megacore.checkpoint.manifest import POINTER_NAME, FileEntry, describe


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write one safetensors file and make it durable."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
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
    temporary.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def point_to(directory: Path) -> None:
    """Make the run's pointer name this checkpoint, in one step."""
    pointer = directory.parent / POINTER_NAME
    temporary = pointer.with_name(f"{POINTER_NAME}.tmp-{os.getpid()}")
    write_text(temporary, f"{directory.name}\n")
    os.replace(temporary, pointer)
    _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
