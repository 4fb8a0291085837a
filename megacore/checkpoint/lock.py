"""One writer for each output directory: a lock that the system takes back from a process that ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
import uuid
from pathlib import Path
from typing import Any

from megacore.errors import UserError
from megacore.files import take_lock
from megacore.safe_json import read_json

LOCK_NAME = "writer.lock"
# A killed run's data workers hold its files open for a moment longer, and a launcher restarts at once.
PATIENCE_SECONDS = 5.0
_MOST_BYTES = 1 << 16  # of the lock's file


class WriterLock:
    """Holds a run's output directory, which is made if missing, from its making to `release`. The file stays behind:
    only the lock on it counts, so nothing that a dead process leaves is in the way. Raises UserError where another
    process writes there, or the lock is no regular file."""

    def __init__(self, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self.path = output_dir / LOCK_NAME
        # Why the directory is not locked, where its file system knows no locks; else None.
        self.warning: str | None = None
        self.token = uuid.uuid4().hex  # what is in the file of this lock and of no other
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor: int | None = os.open(self.path, flags, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UserError(
                f"--output-dir {output_dir}: its lock {LOCK_NAME} is a symbolic link, which is not followed: "
                "remove it, or use another --output-dir"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise UserError(
                    f"--output-dir {output_dir}: its lock {LOCK_NAME} is not a regular file: remove it, or use another "
                    "--output-dir"
                )
            self._take(self._descriptor)
        except BaseException:
            self.release()
            raise

    def _take(self, descriptor: int) -> None:
        try:
            locked = take_lock(descriptor, patience=PATIENCE_SECONDS)
        except BlockingIOError:
            raise UserError(
                f"--output-dir {self.path.parent} is being written by another run ({self._holder()}): "
                "use another --output-dir, or end that run first"
            ) from None
        if not locked:
            self.warning = f"{self.path.parent} is on a file system without locks: let no other run write there"
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "token": self.token}) + "\n"
        # Only now: until it is locked, the text is another run's.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)  # for the other nodes of a network file system

    def _holder(self) -> str:
        said = _said(self.path.parent)
        known = isinstance(said.get("pid"), int) and "host" in said
        return f"pid {said['pid']} on {said['host']!s:.64}" if known else "it does not say which"

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_again(output_dir: Path) -> WriterLock | None:
    """Lock a directory that this process has held, where it was made again since; None: the lock is there. Raises
    UserError where another process writes there now."""
    said = _said(output_dir)
    # Read, not tried: a second lock on the file would find it taken, by this process.
    if (said.get("pid"), said.get("host")) == (os.getpid(), socket.gethostname()):
        return None
    return WriterLock(output_dir)


def sees_lock(output_dir: Path, token: str, *, patience: float) -> bool:
    """Whether the directory is the one that another rank has locked with this token, and not another of its name.
    `patience`: seconds until a node of a network file system has noticed a new file."""
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(OSError):
            os.listdir(output_dir)  # asks a network file system anew
        if _said(output_dir).get("token") == token:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(0.2, patience))


def _said(output_dir: Path) -> dict[str, Any]:
    """What a directory's lock says of its holder; nothing where there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        said = read_json(output_dir / LOCK_NAME, _MOST_BYTES)
        return said if isinstance(said, dict) else {}
    return {}
