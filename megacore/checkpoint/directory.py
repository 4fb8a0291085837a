"""A run's directory: which checkpoints it holds, in which order they were published, and which may go.

Only names decide what counts: `step_00001000`, or `step_00001000.2` where the step was there already. Whatever has such
a name was a checkpoint once: one without its manifest is damaged, not absent. All that is unfinished, or on its way
out, has `.tmp-` in its name. An object store has no rename: there files lie under their last name from the beginning,
beside a mark with `.tmp-`, the first to come and the last to go; with the mark and without a sealed manifest it is
unfinished.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from megacore.checkpoint.files import open_regular
from megacore.files import read_bounded
from megacore.remote import L, Location, RemotePath, exists

MANIFEST_NAME = "manifest.json"
POINTER_NAME = "latest"
# The manifest's first lines: a digest of all that follows, and the serial number.
HEAD = re.compile(rb'\{\n "manifest_sha256": "([0-9a-f]{64})",\n')
MOST_MANIFEST_BYTES = 1 << 26
_SERIAL = re.compile(rb' "serial": (\d{1,15}),\n')
_MOST_POINTER_BYTES = 4096
_MARK = "unfinished"
_STEP = re.compile(r"step_(\d{8,15})(?:\.(\d{1,6}))?")
_UNFINISHED = re.compile(r"(step_\d{8,15}(\.\d{1,6})?|latest)\.tmp(-.*)?")


def step_of(directory: Location) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def published(run: L) -> list[L]:
    """All that has a checkpoint's name, the last published first; before them any whose manifest is damaged or gone. A
    link to a directory that was moved away is the checkpoint that it leads to. Raises OSError where the run's directory
    is there, and cannot be listed."""
    try:
        steps = [cast(L, entry) for entry in run.iterdir() if step_of(entry) is not None]
    except FileNotFoundError:
        return []
    serials = {entry: _serial(entry) for entry in steps}
    steps = [entry for entry in steps if serials[entry] is not None or not is_unfinished(entry)]
    return sorted(
        steps,
        # The serial number says which came last, whatever the clocks: a later run may have ended at an earlier step.
        key=lambda entry: (serials[entry] is None, serials[entry] or 0, step_of(entry), entry.name),
        reverse=True,
    )


def next_serial(run: Location) -> int:
    """The serial number of the next checkpoint."""
    return 1 + max((_serial(directory) or 0 for directory in published(run)), default=0)


def free_name(run: Location, step: int) -> str:
    """The name of a checkpoint of this step that nothing has yet."""
    name, number = f"step_{step:08d}", 1
    while exists(run / name):
        number += 1
        name = f"step_{step:08d}.{number}"
    return name


def temporary_name(name: str) -> str:
    """A name that marks what is unfinished, and that no other writer has."""
    return f"{name}.tmp-{uuid.uuid4().hex[:8]}"


def sweep(run: Location) -> list[str]:
    """Remove what a killed writer has left; only the run's one writer may call it. Returns the names of what was
    there."""
    if isinstance(run, RemotePath):
        return _sweep_remote(run)
    with contextlib.suppress(FileNotFoundError):
        left = sorted(entry for entry in run.iterdir() if _UNFINISHED.fullmatch(entry.name))
        for entry in left:
            # Nothing is deleted through a link.
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        return [entry.name for entry in left]
    return []


def mark(directory: RemotePath) -> RemotePath:
    """Say that a checkpoint of an object store is unfinished; returns what says so."""
    made = directory / temporary_name(_MARK)
    made.write_bytes(b"")
    return made


def marks(directory: RemotePath) -> list[RemotePath]:
    """What says that a checkpoint of an object store is unfinished."""
    with contextlib.suppress(FileNotFoundError):
        return [entry for entry in directory.iterdir() if entry.name.startswith(f"{_MARK}.tmp-")]
    return []


def is_unfinished(directory: Location) -> bool:
    """Whether what has a checkpoint's name is none yet, or none any more: it is marked, and has no sealed manifest."""
    return isinstance(directory, RemotePath) and bool(marks(directory)) and _serial(directory) is None


def remove(directory: RemotePath) -> None:
    """Delete a checkpoint of an object store that is marked: the manifest first, the marks last."""
    # From here on it is no checkpoint, even if this process is killed before the rest is gone.
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    last = marks(directory)
    for path in (*(path for path in directory.files() if path not in last), *last):
        path.unlink(missing_ok=True)
    directory.remove_empty()


def _sweep_remote(run: RemotePath) -> list[str]:
    left = []
    with contextlib.suppress(FileNotFoundError):
        for entry in run.iterdir():
            if step_of(entry) is None or not (found := marks(entry)):
                continue
            if is_unfinished(entry):
                remove(entry)
                left.append(entry.name)
            else:  # it was cut off between the manifest and the end
                for one in found:
                    one.unlink(missing_ok=True)
    return left


def expired(run: L, *, keep_last: int | None, keep_every: int | None, protected: Iterable[Location]) -> list[L]:
    """The checkpoints that need not be kept, the oldest first. What has a damaged manifest, or is a link out of the
    directory, is neither counted nor named; nor is the target of a link. `keep_last`: None keeps all. `keep_every`:
    steps of its multiples are kept."""
    if keep_last is None:
        return []
    checkpoints = published(run)
    kept = {real(path) for path in (*protected, *(path for path in checkpoints if path.is_symlink()))}
    known = [path for path in checkpoints if not path.is_symlink() and _serial(path) is not None]
    old = [path for path in known[keep_last:] if real(path) not in kept]
    return [path for path in reversed(old) if not (keep_every and (step_of(path) or 0) % keep_every == 0)]


def pointed_to(run: Location) -> Location | None:
    """The checkpoint that the run's pointer names, if there is one."""
    named = _named(run)
    return named if named is not None and (named / MANIFEST_NAME).is_file() else None


def lost(run: Location) -> Location | None:
    """The checkpoint that the run's pointer names, where nothing has its name any more."""
    named = _named(run)
    return named if named is not None and not exists(named) else None


def _named(run: Location) -> Location | None:
    try:
        pointer = run / POINTER_NAME
        if isinstance(pointer, RemotePath):
            with pointer.open() as file:
                text = file.read(_MOST_POINTER_BYTES)
        else:
            text = read_bounded(pointer, _MOST_POINTER_BYTES)
        name = text.decode("utf-8").strip()
    except (OSError, ValueError):
        return None
    return run / name if _STEP.fullmatch(name) else None


def real(path: Location) -> str:
    """What a path leads to, however it is spelled."""
    return os.path.realpath(path) if isinstance(path, Path) else path.url


def _serial(directory: Location) -> int | None:
    """The serial number in a checkpoint's manifest; None where the manifest is damaged."""
    try:
        with open_regular(directory / MANIFEST_NAME) as file:
            text = file.read(MOST_MANIFEST_BYTES)
    except OSError:
        return None
    head = HEAD.match(text)
    serial = _SERIAL.match(text, head.end()) if head else None
    if head is None or serial is None or not is_sealed(text):
        return None
    return int(serial[1])


def is_sealed(text: bytes) -> bool:
    """Whether a manifest's text begins with the digest of all that follows."""
    head = HEAD.match(text)
    return head is not None and hashlib.sha256(memoryview(text)[head.end() :]).hexdigest().encode() == head[1]
