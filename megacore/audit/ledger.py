"""The ledger's file: a line of JSON for each start, step, rollback and save of a run, each sealed with the SHA-256 of
itself and of the line before.

    {"sha256": "...", "line": "step", "step": 7, "samples": [48, 56], "loss": "0x1.5p+2", ..., "previous": "..."}

Lines are only appended. A run that goes back to an earlier step, after a resume or a spike, says so in a line, and the
lines of the steps that it takes again stay. Nothing here loads torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megacore.errors import StorageError, UserError
from megacore.files import GrowingFile, open_regular

FILE = "ledger.jsonl"
BEGINS = ("start", "rollback")
"""Lines after which steps follow that of their `step`, whatever came before."""
_FIRST = "0" * 64
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
_LONGEST = 1 << 26
_SAID = {"step": int, "previous": str, "line": str}


class Line(NamedTuple):
    """A line of a ledger."""

    number: int  # from 1
    sha256: str
    record: Mapping[str, Any]  # what it says

    @property
    def kind(self) -> str:
        kind: str = self.record["line"]
        return kind

    @property
    def step(self) -> int:
        """The number of the last step before it was written."""
        step: int = self.record["step"]
        return step


class BrokenLedger(Exception):
    """A line is not what the run wrote; the text names the first that is not."""


def sealed(record: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """The text of a line after that with the seal `previous`, and its own seal."""
    body = json.dumps({**record, "previous": previous}, allow_nan=False)[1:].encode()
    seal = hashlib.sha256(body).hexdigest()
    return b'{"sha256": "%s", %s\n' % (seal.encode(), body), seal


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a ledger, as far as the chain holds; a last line without an end, of a run that was killed, is left
    out. Raises BrokenLedger where the chain breaks; UserError where the file cannot be read."""
    previous = _FIRST
    try:
        file = open_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the {FILE} of a run with --ledger") from None
    with file:
        for number, text in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
            if not text.endswith(b"\n"):
                return
            seal = _SEAL.match(text)
            body = text[seal.end() : -1] if seal else b""
            if seal is None or hashlib.sha256(body).hexdigest().encode() != seal[1]:
                raise BrokenLedger(f"line {number} of {path} was changed: its seal is that of other text")
            record = json.loads(b"{" + body)
            if record.get("previous") != previous:
                raise BrokenLedger(f"line {number} of {path} does not follow line {number - 1}: lines are missing")
            if any(type(record.get(name)) is not kind for name, kind in _SAID.items()):
                raise BrokenLedger(f"line {number} of {path} is none of a ledger's")
            previous = seal[1].decode()
            yield Line(number, previous, record)


class Ledger:
    """A ledger to which a run appends. `path`: of the file; one that is there is continued. Raises UserError where it
    is no whole ledger; StorageError where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: Line | None = None  # the last line that was there; None: it is new
        try:
            for line in lines_of(path) if path.exists() else ():
                self.last = line
        except BrokenLedger as error:
            raise UserError(f"{error}, and this run cannot continue it: move it away") from None
        self._seal = _FIRST if self.last is None else self.last.sha256
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():  # a killed run may have begun a line, which says nothing
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file = GrowingFile(path)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from None

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises StorageError where the line cannot be written."""
        text, seal = sealed(record, self._seal)
        try:
            self._file.append(text)
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror}") from None
        self._seal = seal

    def close(self) -> None:
        self._file.sync()
        self._file.close()
