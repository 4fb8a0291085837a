"""A directory that appears under its name whole or not at all, and never replaces another."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megacore.errors import CheckpointError


@contextlib.contextmanager
def published(final: Path) -> Iterator[Path]:
    """Give a temporary directory beside `final`, which gets that name when the block ends well, and is removed
    otherwise.

    Raises:
        CheckpointError: there is something of that name already.
    """
    _require_new(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for directory in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            for file in directory.iterdir():
                if file.is_file():
                    _sync(file)
            _sync(directory)
        _require_new(final)
        temporary.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _require_new(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"--output {final} exists: give the name of a new directory; nothing is overwritten")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
