"""A cache of NumPy arrays on disk that can be wrong in no way that matters.

An entry is a directory named by the hash of everything its arrays follow from, published by one rename. Read back,
every array is checked against its shape, dtype and CRC-32. Arrays are plain .npy without pickles, memory-mapped, so
that the ranks of a node share one copy. Where the directory cannot be written, or holds no locks, each process builds
for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacore.files import take_lock
from megacore.safe_json import read_json

Arrays = dict[str, NDArray]
_LOG = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 1 << 24
_LOCK_PATIENCE_S = 600.0  # a builder that takes longer is taken for stopped, and is built past
_ABANDONED_S = 3600.0  # temporary directories of killed builders are removed after this


def cached_arrays(folder: Path | None, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays by name that follow from a description (JSON values, the entry's key), read-only; built if no sound
    entry exists. `folder`: made if missing; None to build in memory."""
    if folder is None:
        return build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write {folder}")
    except OSError as error:
        _LOG.info("index cache %s cannot be used (%s): indices are built in memory", folder, error)
        return build()
    entry = folder / hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
    loaded = _load(entry, description)
    if loaded is not None:
        return loaded
    with _build_lock(entry.with_suffix(".lock")):
        loaded = _load(entry, description)  # another process may have built it while this one waited
        if loaded is not None:
            return loaded
        arrays = build()
        try:
            _publish(entry, description, arrays)
        except OSError as error:
            _LOG.warning("index cache %s could not be written (%s): indices stay in memory", entry, error)
            return arrays
    # What was just written needs no checksum; mapped, it shares its memory with the other ranks.
    return _load(entry, description, trusted=True) or arrays


def _load(entry: Path, description: Mapping[str, Any], *, trusted: bool = False) -> Arrays | None:
    """The arrays of an entry, or None if it is missing or unsound in any respect."""
    if not entry.is_dir():
        return None
    try:
        manifest = read_json(entry / _MANIFEST, _MOST_MANIFEST_BYTES)
        if manifest["description"] != dict(description):
            raise ValueError("made from another description")
        arrays: Arrays = {}
        for name, facts in manifest["arrays"].items():
            # The manifest may come from anyone who can write here: a name must not lead out of the entry.
            if Path(name).name != name:
                raise ValueError(f"array name {name!r}")
            # open_memmap reads nothing but .npy: np.load would also open zip archives.
            array = np.asarray(np.lib.format.open_memmap(entry / f"{name}.npy", mode="r"))
            if not trusted and _facts(array) != facts:
                raise ValueError(f"{name}.npy does not match its checksum")
            arrays[name] = array
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("index cache %s is damaged (%s): it is built again", entry, error)
        return None
    return arrays


def _publish(entry: Path, description: Mapping[str, Any], arrays: Arrays) -> None:
    """Write an entry under a temporary name and rename it; the first of several builders wins. Nothing is synced: what
    a power failure tears does not match its checksum."""
    for path in entry.parent.glob(f"{entry.name}.tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
    partial = entry.with_suffix(f".tmp-{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        for name, array in arrays.items():
            with open(partial / f"{name}.npy", "wb") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        facts = {name: _facts(array) for name, array in arrays.items()}
        with open(partial / _MANIFEST, "w") as text:
            json.dump({"description": dict(description), "arrays": facts}, text, indent=1)
        if entry.exists():  # whatever is there did not load: move it out of the way in one step
            if _load(entry, description) is not None:
                return
            damaged = entry.with_suffix(f".tmp-{uuid.uuid4().hex}")
            entry.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            partial.rename(entry)
    except OSError as error:
        if not entry.exists():
            raise
        _LOG.info("index cache %s was published by another process (%s)", entry, error)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _facts(array: NDArray) -> dict[str, Any]:
    checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "crc32": checksum}


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Let one process of this host build at a time; the lock dies with its holder. It only saves work."""
    try:
        file = open(path, "a")  # noqa: SIM115 - closed below
    except OSError:
        yield
        return
    with file:
        with contextlib.suppress(OSError):
            take_lock(file.fileno(), patience=_LOCK_PATIENCE_S)
        yield
