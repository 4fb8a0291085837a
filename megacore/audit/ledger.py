"""The ledger's file: a line of JSON for each start, step, rollback and save of a run, each sealed with the SHA-256 of
itself and of the line before.

    {"sha256": "...", "line": "step", "step": 7, "samples": [48, 56], "loss": "0x1.5p+2", ..., "previous": "..."}

Lines are only appended. A run that goes back to an earlier step, after a resume or a spike, says so in a line, and the
lines of the steps that it takes again stay. Nothing here loads torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megacore.errors import CheckpointError, StorageError, UserError
from megacore.files import GrowingFile, open_regular
from megacore.safe_json import parse_object

FILE = "ledger.jsonl"
BEGINS = ("start", "rollback")
"""Lines after which steps follow that of their `step`, whatever came before."""
_FIRST = "0" * 64
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
_LONGEST = 1 << 26


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _hash(value: Any) -> bool:
    """Whether it has 64 bits."""
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _number(value: Any) -> bool:
    """Whether it is a number bit by bit."""
    try:
        float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _absent_or(form: Callable[[Any], bool], value: Any) -> bool:
    return value is None or form(value)


def _hashes(value: Any) -> bool:
    """Whether it has a hash for each name."""
    return isinstance(value, dict) and all(_name(name) and _hash(text) for name, text in value.items())


def _hashes_of_kinds(value: Any) -> bool:
    return isinstance(value, dict) and all(_name(kind) and _hashes(of) for kind, of in value.items())


def _facts(value: Any) -> bool:
    """Whether they have the settings on which the comparison of a step depends."""
    return (
        isinstance(value, dict)
        and all(map(_text, value.values()))
        and all(re.fullmatch(form, value.get(name, "")) for name, form in _NEEDED_FACTS.items())
    )


_HASH = re.compile("[0-9a-f]{16}")
_NEEDED_FACTS = {
    **dict.fromkeys(("--tp", "--cp"), "[1-9][0-9]{0,8}"),
    **dict.fromkeys(("--reproducible", "--sequence-parallel"), "True|False|None"),
    "--precision": ".+",
}
_OF_STATE: dict[str, Callable[[Any], bool]] = {"step": _count, "samples": _count, "state": _hashes_of_kinds}
_SCHEMA: dict[str, dict[str, Callable[[Any], bool]]] = {
    "start": {
        **_OF_STATE,
        "loaded": functools.partial(_absent_or, _text),
        "layout": lambda value: isinstance(value, dict),
        "facts": _facts,
    },
    "step": {
        "step": _count,
        "samples": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_count, value)),
        **dict.fromkeys(("lr", "loss", "norm"), _number),
        "skipped": functools.partial(_absent_or, _name),
        "data": functools.partial(_absent_or, _hash),
        "state": functools.partial(_absent_or, _hashes),
        "tensors": functools.partial(_absent_or, _text),
    },
    "save": {**_OF_STATE, "manifest": _text, "checkpoint": _name, "updates": functools.partial(_absent_or, _count)},
    "rollback": _OF_STATE,
}
"""What the lines of each kind say, as far as something is read of it, and whether a value has its form."""


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
            try:
                record = parse_object(b"{" + body, f"line {number} of {path}")
            except CheckpointError as error:
                raise BrokenLedger(str(error)) from None
            if record.get("previous") != previous:
                raise BrokenLedger(f"line {number} of {path} does not follow line {number - 1}: lines are missing")
            if (field := _wrong_field(record)) is not None:
                raise BrokenLedger(
                    f"line {number} of {path} is none of a ledger's: the field {field} is missing or malformed"
                )
            previous = seal[1].decode()
            yield Line(number, previous, record)


def _wrong_field(record: Mapping[str, Any]) -> str | None:
    """The first field of a line that has not the form of its kind."""
    kind = record.get("line")
    forms = _SCHEMA.get(kind) if isinstance(kind, str) else None
    if forms is None:
        return "line"
    return next((field for field, has_form in forms.items() if not has_form(record.get(field))), None)


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
