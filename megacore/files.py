"""Files that another process may read or write at any moment: each appears whole or not at all, and has one writer. A
lock is one of the operating system (flock): it ends with the process that holds it, however that ends, so that nothing
a dead process leaves is ever in the way. Some network file systems know no locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
    """Write all of `data` at the file's position: the system may take less of it at a time. Raises OSError where not
    all of it could be written."""
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


class GrowingFile:
    """A file that is appended to for as long as a run lasts. If the file or its directory is deleted or renamed
    meanwhile, it is made again under its path, with all that it had: the open file still has that.

    Args:
        path: of a regular file, which is made if it is missing.
        before_restoring: called before the file is made again; an exception prevents it.

    Raises:
        OSError: it is no regular file, such as a pipe that would block, is a link, or cannot be written.
    """

    def __init__(self, path: Path, *, before_restoring: Callable[[], None] = lambda: None) -> None:
        self.path, self._before_restoring = path, before_restoring
        self._file = _open_to_append(path)

    def append(self, data: bytes) -> str | None:
        """Append all of `data`, or leave the file as it was; returns and raises what `restore` does."""
        what = self.restore()
        before = os.fstat(self._file.fileno()).st_size
        try:
            write_all(self._file.fileno(), data)
        except OSError:
            os.ftruncate(self._file.fileno(), before)
            raise
        return what

    def restore(self) -> str | None:
        """Make the file again if its path does not lead to it any more. Returns what became of it, in words; None: it
        is as it was. Raises OSError where it cannot be made."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return None
        self._before_restoring()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = _open_to_append(self.path)
        with self._file as old:
            had, where, there = _all_of(old), _known_as(old), _all_of(new)
        self._file = new
        if there == had and there:
            return None  # a copy, or a file system that counts its files anew
        what = f"{self.path} was deleted" if where is None else f"{self.path} is {where} now"
        if not had.startswith(there):
            return f"{what}: what follows is appended to the file that has its name"
        write_all(new.fileno(), had[len(there) :])
        return f"{what}: it is made again, with all that it had" if had else f"{what}: it is made again, empty"

    def sync(self) -> None:
        """Flush the content to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more is appended."""
        self._file.close()


def _open_to_append(path: Path) -> BinaryIO:
    if path.is_symlink():  # what it leads to is no file of the run
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))
    flags = os.O_NOFOLLOW | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with naming(path):
        descriptor = os.open(path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return open(descriptor, "r+b", buffering=0)


def _all_of(file: BinaryIO) -> bytes:
    """What an open file has, wherever its name is; nothing, where a network file system has lost it."""
    with contextlib.suppress(OSError):
        file.seek(0)
        return file.read()
    return b""


def _known_as(file: BinaryIO) -> Path | None:
    """The path that an open file has now; None where it has none, or the system does not say."""
    with contextlib.suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        return path if path.exists() else None
    return None


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file, or of a link to one. Pipes and devices are refused before anything is read: they
    would block, or never end. `most`: bytes that it may have. Raises OSError where it is no regular file, is larger, or
    cannot be read; `strerror` says which."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, more than the {most:,} that are read", str(path))
        return file.read(most)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. A pipe that nothing writes to would block for ever. Raises
    OSError where it is no regular file, or cannot be read; `strerror` says which."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def why_unwritable(path: Path) -> str | None:
    """Why a file cannot be written or replaced, found out before there is anything to write; None where it can. A
    directory can refuse files although its permissions allow them, as /proc does: so a nameless file is made in it.
    `path`: of the file, or of a link to one; it need not exist."""
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
    """Whether what is left of this process's standard output finds no reader, as after `| head`. It is then discarded,
    so that the interpreter does not fail on it when it ends."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def cache_home() -> Path | None:
    """Where this user's copies of remote files lie on this node: `$XDG_CACHE_HOME/megacore`, or in ~/.cache; None: the
    user has no home. The specification of that variable has relative paths ignored."""
    for path in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(path):
            return Path(path) / "megacore"
    return None


def take_lock(descriptor: int, *, patience: float = 0.0) -> bool:
    """Lock an open file or directory for this process, until it is closed or the process ends. `patience`: seconds to
    wait for another holder. Returns whether it is locked now; False where its file system knows no locks. Raises
    BlockingIOError where another process holds the lock all this time."""
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
    """Why a path must not be read: it is not a regular file, or so large that it would fill the memory. Returns the
    reason, or None for a small regular file. Raises OSError where the path does not exist, or its status cannot be
    read."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
    if status.st_size > _MOST_SETTINGS:
        return f"has {status.st_size:,} bytes, more than the limit of {_MOST_SETTINGS:,}"
    return None
