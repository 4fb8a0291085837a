"""Reads JSON that a stranger may have made: its size, its nesting and its numbers are bounded, and no name is there
twice."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError
from megacore.files import read_bounded

# Parsed, a file takes several times its size in memory; the largest index in use is a tenth of this.
_LARGEST = 4 << 20
_MOST_DIGITS = 4000  # Python refuses a little more, and names a function of its own
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (_MOST_DIGITS + 1))


def parse_json(data: bytes, *, unique: bool = True) -> Any:
    """The value that the bytes spell.

    Args:
        data: UTF-8 text, perhaps after a byte order mark, already of bounded size.
        unique: whether a name that is twice in an object is an error; else the last one counts.

    Raises:
        ValueError: it is no JSON, too deep, or has too long a number or a name twice.
    """
    try:
        return json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_without_duplicates if unique else None,
            parse_int=_whole if _LONG_NUMBER.search(data) else None,
        )
    except RecursionError:  # the parser's limit, long before memory is one
        raise ValueError("its JSON is nested too deep") from None


def read_json(path: Path, most: int = _LARGEST, *, unique: bool = True) -> Any:
    """The value in a JSON file of at most so many bytes.

    Raises:
        OSError: it is missing, no regular file, or larger.
        ValueError: as by `parse_json`.
    """
    return parse_json(read_bounded(path, most), unique=unique)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing, no regular file, too large or too deep, not JSON, or no object.
    """
    try:
        data = read_bounded(path, _LARGEST)
    except OSError as error:
        verb = "" if error.errno in (errno.EINVAL, errno.EFBIG) else "cannot be read: "
        raise CheckpointError(f"{path} {verb}{error.strerror}") from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The object that the bytes spell; `where` is what they are, for messages.

    Raises:
        CheckpointError: it is too deep, has a name twice, is not JSON, or no object.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        if "nested too deep" in str(error):
            raise CheckpointError(f"{where}: {error}") from None
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:80]!r} is there twice")
            seen.add(name)
    return values
