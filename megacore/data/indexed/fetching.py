"""Datasets in an object store: a copy on this node's disk, which its processes make once and share. A directory is
named by the URL and the versions of the objects: another version is another copy. A download that was cut off
continues."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from megacore.errors import DataError
from megacore.files import cache_home, take_lock
from megacore.progress import Progress
from megacore.remote import RemotePath, is_url

_REQUIRED = (".bin", ".idx")
# The sidecar is believed only if it is the newest of the files: it comes last.
_OPTIONAL = ("_loss_mask.bin", "_loss_mask.idx", ".json")
CHUNK = 8 << 20  # bytes
PATIENCE_SECONDS = 24 * 3600.0  # for another process of this node, which shows its progress


def local_prefix(prefix: str, cache: str | None) -> str:
    """The prefix under which a dataset's files can be opened, without `.bin` and `.idx`: the given one, or that of the
    copy of a URL. Raises DataError where it cannot be read, or there is no room for it."""
    if not is_url(prefix):
        return prefix
    if (home := cache_home() if cache is None else Path(cache)) is None:
        raise DataError(f"--data-path {prefix} is copied, and this user has no home directory: use --data-cache-path")
    root = home / "datasets"
    remote = RemotePath(prefix)
    try:
        sources = {ending: RemotePath(prefix + ending) for ending in (*_REQUIRED, *_OPTIONAL)}
        found = {name: source for name, source in sources.items() if name in _REQUIRED or source.exists()}
        versions = {name: source.version() for name, source in found.items()}
        # Another version gets another directory, so that a run never reads parts of two.
        key = hashlib.sha256(repr((prefix, sorted(versions.items()))).encode()).hexdigest()[:16]
        directory = root / f"{remote.name}-{key}"
        copy = str(directory / remote.name)
        if all(os.path.exists(copy + name) for name in found):
            return copy
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "a") as lock:  # the processes of a node download once
            take_lock(lock.fileno(), patience=PATIENCE_SECONDS)
            fetch({name: source for name, source in found.items() if not os.path.exists(copy + name)}, copy)
    except OSError as error:
        raise DataError(f"--data-path {prefix}: {error.filename or root}: {error.strerror or error}") from error
    return copy


def fetch(sources: dict[str, RemotePath], copy: str) -> None:
    """Download what is missing; each file gets its name when it is complete."""
    parts = {name: Path(f"{copy}{name}.part") for name in sources}
    sizes = {name: source.stat().st_size for name, source in sources.items()}
    have = {name: min(part.stat().st_size, sizes[name]) if part.exists() else 0 for name, part in parts.items()}
    missing, free = sum(sizes.values()) - sum(have.values()), shutil.disk_usage(Path(copy).parent).free
    if missing > free:
        raise DataError(
            f"the copy of --data-path needs {missing:,} more bytes in {Path(copy).parent}, which has {free:,}: make "
            "room, or choose another disk with --data-cache-path"
        )
    with Progress(f"downloading {Path(copy).name}", missing) as progress:
        for name, source in sources.items():
            with parts[name].open("r+b" if parts[name].exists() else "wb") as out, source.open() as file:
                out.truncate(have[name])
                out.seek(have[name])
                file.seek(have[name])
                while chunk := file.read(CHUNK):
                    out.write(chunk)
                    progress.advance(len(chunk))
                out.flush()
                os.fsync(out.fileno())
                if out.tell() != sizes[name]:
                    raise DataError(f"{source}: {out.tell():,} of {sizes[name]:,} bytes came: start again")
            parts[name].rename(f"{copy}{name}")
