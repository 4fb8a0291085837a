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
    """Give a new file to write, which replaces `path` in one step when the block ends well. `durable`: it survives a
    power failure. Raises OSError, which names `path`; nothing of the new file is left."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
                if durable:
                    file.flush()
                    # Before the new name: else a power failure may leave the name, and no content.
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if durable:
                # The name itself is in the directory.
                sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Make `data` the content of a file, in one step; arguments and errors as for `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data` at the file's position. Raises OSError."""
    rest = memoryview(data)
    while rest:
        # The system may take less than it is given, as on a disk that is nearly full.
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
    meanwhile, it is made again under its path, with all that it had. `before_restoring`: called before that; an
    exception prevents it. Raises OSError where it is no regular file, or cannot be written."""

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
            # No half line stays: what reads the file takes one record a line.
            os.ftruncate(self._file.fileno(), before)
            raise
        return what

    def restore(self) -> str | None:
        """Make the file again if its path does not lead to it any more; what became of it, in words, or None."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return None
        self._before_restoring()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = _open_to_append(self.path)
        # The open file still has the content of the deleted one.
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
        os.fsync(self._file.fileno())

    def close(self) -> None:
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
    """The content of a regular file, or of a link to one, of at most `most` bytes. Raises OSError; `strerror` says
    why."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, more than the {most:,} that are read", str(path))
        return file.read(most)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises OSError; `strerror` says why."""
    # Without O_NONBLOCK a pipe that nothing writes to would block for ever; a device might never end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def why_unwritable(path: Path) -> str | None:
    """Why a file, or a link to one, cannot be written or replaced, before there is anything to write; None where it
    can."""
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
        # A directory can refuse files although its permissions allow them, as /proc does. This one has no name.
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return f"cannot be written: {path.parent} takes no new files ({error.strerror})"
    return None


def output_is_closed() -> bool:
    """Whether what is left of this process's standard output finds no reader, as after `| head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Else the interpreter would flush to the pipe once more when it ends, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def cache_home() -> Path | None:
    """Where this user's copies of remote files lie on this node: `$XDG_CACHE_HOME/megacore`, or in ~/.cache; None: no
    home."""
    for path in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        # The specification of that variable has relative paths ignored.
        if os.path.isabs(path):
            return Path(path) / "megacore"
    return None


def take_lock(descriptor: int, *, patience: float = 0.0, shared: bool = False) -> bool:
    """Lock an open file or directory until it is closed or the process ends; whether it is locked: some file systems
    know no locks. `patience`: seconds to wait for another holder, before BlockingIOError. `shared`: with others that
    share it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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
    """Why a path must not be read: it is not a regular file, or too large for settings. Raises OSError where it does
    not exist."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
    if status.st_size > _MOST_SETTINGS:
        return f"has {status.st_size:,} bytes, more than the limit of {_MOST_SETTINGS:,}"
    return None
