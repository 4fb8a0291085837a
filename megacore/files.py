"""Files that another process may read or write at any moment: each appears whole or not at all, and has one writer.

A lock is one of the operating system (flock): it ends with the process that holds it, however that ends, so that
nothing a dead process leaves is ever in the way. Some network file systems know no locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MOST_SETTINGS = 1 << 24  # bytes of a file of settings
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Give a new file to write, which replaces `path` in one step when the block ends well.

    Args:
        path: of the file; what is there before stays until the new one is complete.
        durable: also flush the file and its name to the disk, so that they survive a power failure.

    Raises:
        OSError: it cannot be written; the error names `path`, and the new file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if durable:
                sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Make `data` the content of a file, in one step; arguments and errors as for `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data` at the file's position: the system may take less of it at a time.

    Raises:
        OSError: not all of it could be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error
        raise


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_bytes(path: Path, data: bytes) -> None:
    """Append to a regular file, which is made if it is missing.

    Raises:
        OSError: it is no regular file, such as a pipe that would block, is a link, or cannot be written.
    """
    if path.is_symlink():  # what it leads to is no file of the run
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))
    flags = os.O_NOFOLLOW | os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with naming(path), open(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        write_all(file.fileno(), data)


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file, or of a link to one.

    Pipes and devices are refused before anything is read: they would block, or never end.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: it is no regular file, is larger, or cannot be read; `strerror` says which.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, more than the {most:,} that are read", str(path))
        return file.read(most)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. A pipe that nothing writes to would block for ever.

    Raises:
        OSError: it is no regular file, or cannot be read; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def why_unwritable(path: Path) -> str | None:
    """Why a file cannot be written or replaced, found out before there is anything to write; None where it can.

    A directory can refuse files although its permissions allow them, as /proc does: so a nameless file is made in it.

    Args:
        path: of the file, or of a link to one; it need not exist.
    """
    try:
        path = path.resolve()
        if path.exists():
            if not path.is_file():
                return "is a directory" if path.is_dir() else "is not a regular file"
            if not os.access(path, os.W_OK):
                return "cannot be written"
        else:
            os.lstat(path.parent / path.name)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        return f"cannot be written: {error.strerror if isinstance(error, OSError) else error}"
    if not path.parent.is_dir():
        return f"cannot be written: {path.parent} is not a directory"
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return f"cannot be written: {path.parent} takes no new files ({error.strerror})"
    return None


def output_is_closed() -> bool:
    """Whether what is left of this process's standard output finds no reader, as after `| head`.

    It is then discarded, so that the interpreter does not fail on it when it ends.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def cache_home() -> Path:
    """Where this user's copies of remote files lie on this node: `$XDG_CACHE_HOME/megacore`, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "megacore"


def take_lock(descriptor: int, *, patience: float = 0.0) -> bool:
    """Lock an open file or directory for this process, until it is closed or the process ends.

    Args:
        descriptor: of the file.
        patience: seconds to wait for another holder.

    Returns:
        Whether it is locked now; False where its file system knows no locks.

    Raises:
        BlockingIOError: another process holds the lock all this time.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(min(0.05, patience))
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise


def unreadable(path: str | Path) -> str | None:
    """Why a path must not be read: it is not a regular file, or so large that it would fill the memory.

    Returns:
        The reason, or None for a small regular file.

    Raises:
        OSError: the path does not exist, or its status cannot be read.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
    if status.st_size > _MOST_SETTINGS:
        return f"has {status.st_size:,} bytes, more than the limit of {_MOST_SETTINGS:,}"
    return None
