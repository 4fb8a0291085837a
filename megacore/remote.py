"""Files of object stores, by URL through fsspec: `s3://bucket/run`, `gs://bucket/run`, `memory://run`.

A `RemotePath` has the part of `pathlib.Path` that reading a checkpoint takes (`Location` is either). An object appears
whole or not at all. There is no rename, no link and no lock. What fails is an OSError that names the URL.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from megacore.errors import UserError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_READ_AHEAD = 8 << 20  # bytes fetched at a time where little is asked for: the rows of a slice follow one another
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of setup.cfg
_ON_DISK = ("file", "local")


class RemoteStatus(NamedTuple):
    """What `RemotePath.stat` says, by the name of `os.stat_result`."""

    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """An object, or all objects whose names begin with this one and a slash (a directory)."""

    url: str  # with its scheme, without a slash at the end

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is an object, or a directory with one."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is an object of this very name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there are objects in it."""
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        """Stores have no links."""
        return False

    def stat(self) -> RemoteStatus:
        with self._naming() as (files, path):
            return RemoteStatus(st_size=int(files.info(path)["size"]))

    def version(self) -> str:
        """A text that is another one once the object has another content, as far as the store tells."""
        with self._naming() as (files, path):
            files.invalidate_cache(files._parent(path))
            facts = files.info(path)
            # Stores call it by different names; what one lacks is None.
            known = (facts.get(key) for key in ("size", "ETag", "etag", "md5Hash", "generation", "mtime", "created"))
            return " ".join(map(str, (*known, facts.get("LastModified"))))

    def iterdir(self) -> Iterator[RemotePath]:
        """What is directly in the directory, as the store has it now. Raises FileNotFoundError where nothing is."""
        with self._naming() as (files, path):
            files.invalidate_cache(path)
            # What fsspec has listed once it would list again, whatever other writers have done.
            whole = files.ls(path, detail=False)
        own = str(path).rstrip("/")
        names = {str(name).rstrip("/") for name in whole} - {own}  # a store may name the directory itself
        yield from (self / name.rpartition("/")[2] for name in sorted(names))

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """The object's content: read by ranges, as it is asked for."""
        assert mode == "rb"
        with self._naming() as (files, path):
            file: BinaryIO = files.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")
            return file

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[Any], object]]:
        """Give what takes the parts of a new object, which appears when the block ends well."""
        with self._naming() as (files, path):
            file = files.open(path, "wb")
            try:
                yield file.write
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):
                    file.closed = True  # else the end of its life would complete the object
                raise
            file.close()

    def write_bytes(self, data: bytes) -> None:
        with self._naming() as (files, path):
            files.pipe_file(path, data)

    def read_bytes(self) -> bytes:
        with self._naming() as (files, path):
            return bytes(files.cat_file(path))

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            with self._naming() as (files, path):
                files.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_empty(self) -> None:
        """Delete the directory itself, which holds no object any more, where the store has directories."""
        with self._naming() as (files, path):
            # A real store has no directories: they end with their last object.
            if self.url.partition("://")[0] in _ON_DISK and files.exists(path):
                files.rm(path, recursive=True)

    def files(self) -> list[RemotePath]:
        """All objects in the directory and in those below it; none where there are none."""
        with self._naming() as (files, path):
            files.invalidate_cache(path)
            own = str(path).rstrip("/")
            found = [str(name).removeprefix(own).lstrip("/") for name in files.find(path)]
        return [RemotePath(f"{self.url}/{name}") for name in found if name]

    def _kind(self) -> str | None:
        try:
            with self._naming() as (files, path):
                files.invalidate_cache(files._parent(path))
                return str(files.info(path)["type"])
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _naming(self) -> Iterator[tuple[Any, str]]:
        """Give the file system and the path in it, and make an OSError with the URL of whatever fails."""
        try:
            files = _file_system(self.url.partition("://")[0])
            yield files, files._strip_protocol(self.url)
        except OSError as error:
            text = error.strerror or str(error) or type(error).__name__
            number = error.errno or _NUMBERS.get(type(error), errno.EIO)
            if error.filename == self.url:
                raise
            raise (
                type(error)(number, text, self.url) if type(error) in _NUMBERS else OSError(number, text, self.url)
            ) from error
        except (AssertionError, MemoryError):
            raise
        except Exception as error:  # each library has its own
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error


_NUMBERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
    IsADirectoryError: errno.EISDIR,
}
Location = Path | RemotePath
L = TypeVar("L", bound=Location)


def is_url(text: str) -> bool:
    """Whether a text has a scheme, as `s3://bucket/run` has."""
    return _URL.match(text) is not None


def location(text: str | os.PathLike[str] | RemotePath) -> Location:
    """What a path or a URL leads to; nothing is asked of a store."""
    if isinstance(text, RemotePath):
        return text
    given = os.fspath(text)
    return RemotePath(given.rstrip("/")) if is_url(given) else Path(given)


def exists(path: Location) -> bool:
    """Whether something has this name, be it a link that leads nowhere."""
    return os.path.lexists(path) if isinstance(path, Path) else path.exists()


def url_problem(url: str, *, writes: bool = False) -> str | None:
    """Why the URL of a directory cannot be used, with the way out; `writes`: an object is written there and deleted."""
    match, path = _URL.match(url), RemotePath(url.rstrip("/"))
    assert match is not None
    scheme, rest = match[1], match[2]
    if problem := _scheme_problem(scheme):
        return f"{url} {problem}"
    if not rest.strip("/"):
        return f"{url} names no place: use {scheme}://BUCKET/PATH"
    try:
        if writes:
            # Its name has `.tmp-`: a sweep removes it where this process is killed before it does.
            probe = path / f"probe.tmp-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"")
            probe.unlink()
        else:
            with contextlib.suppress(FileNotFoundError):  # of a bucket that is not there the reader says so
                next(path.iterdir(), None)
    except PermissionError as error:
        verb = "written" if writes else "read"
        return f"{url} may not be {verb}: {error.strerror}: check the credentials and what they allow"
    except OSError as error:
        verb = "written" if writes else "read"
        return f"{url} cannot be {verb}: {error.strerror}: check the name, the credentials and the network"
    return None


def usable(text: str) -> Location:
    """What a path or a URL leads to. Raises UserError where the URL cannot be read."""
    if is_url(text) and (problem := url_problem(text)):
        raise UserError(problem)
    return location(text)


def _scheme_problem(scheme: str) -> str | None:
    import fsspec
    from fsspec.registry import known_implementations

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        return f"has the unknown scheme {scheme}://: use s3://, gs:// or another one that fsspec knows, or a directory"
    except ImportError:
        package = known_implementations[scheme]["class"].partition(".")[0]
        extra = f'pip install "megacore[{_EXTRAS[scheme]}]", or ' if scheme in _EXTRAS else ""
        return f"needs the package {package}, which is not installed: {extra}pip install {package}"
    return None


@functools.cache
def _file_system(scheme: str) -> Any:
    import fsspec

    return fsspec.filesystem(scheme, **({"auto_mkdir": True} if scheme in _ON_DISK else {}))
