"""A directory that appears under its name whole or not at all, and never replaces another."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megacore.errors import CheckpointError
from megacore.files import sync, take_lock


@contextlib.contextmanager
def published(final: Path) -> Iterator[Path]:
    """Give a temporary directory beside `final`, which gets that name when the block ends well, and is removed
    otherwise. Raises CheckpointError where there is something of that name already, or nothing can be made there."""
    if final.name in ("", ".."):
        raise CheckpointError(f"--output {final} is no name of a new directory: give one")
    _require_new(final)
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(final)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"--output {final} cannot be made: {error.strerror}") from None
    lock = os.open(temporary, os.O_RDONLY)
    try:
        take_lock(lock)
        yield temporary
        for directory in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            for file in directory.iterdir():
                if file.is_file():
                    sync(file)
            sync(directory)
        _require_new(final)
        temporary.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _remove_stale(final: Path) -> None:
    """Remove what killed conversions to the same name have left: of processes that are gone, as the system says, and
    whose lock is free, since on a shared file system a process may live elsewhere."""
    prefix = f".{final.name}.tmp-"
    for left in final.parent.glob(f"{glob.escape(prefix)}*"):
        number = left.name.removeprefix(prefix)
        if left.is_symlink() or not left.is_dir() or not number.isdecimal() or Path(f"/proc/{number}").exists():
            continue
        lock = os.open(left, os.O_RDONLY)
        try:
            if take_lock(lock):
                shutil.rmtree(left)
            else:
                print(f"{left} may be what a killed conversion left: remove it if none is running")
        except BlockingIOError:
            print(f"{left} is being written by another conversion")
        finally:
            os.close(lock)


def _require_new(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"--output {final} exists: give the name of a new directory; nothing is overwritten")
