"""Reads JSON that a stranger may have made: its size is bounded before anything is built from it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError
from megacore.files import read_bounded

# Parsed, a file takes several times its size in memory; the largest index in use is a tenth of this.
LARGEST_JSON = 4 << 20
_MOST_DIGITS = 4000  # Python refuses a little more, and names a function of its own


def read_object(path: Path, *, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it is missing, no regular file, too large or too deep, not JSON, or no object.
    """
    try:
        data = read_bounded(path, largest)
    except OSError as error:
        verb = "" if error.errno in (errno.EINVAL, errno.EFBIG) else "cannot be read: "
        raise CheckpointError(f"{path} {verb}{error.strerror}") from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The object that the bytes spell.

    Args:
        data: UTF-8 text, already of bounded size.
        where: what it is, for messages.

    Raises:
        CheckpointError: it is too deep, has a name twice, is not JSON, or no object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=without_duplicates, parse_int=_whole)
    except RecursionError:  # the parser's limit, long before memory is one
        raise CheckpointError(f"{where}: its JSON is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these names and values, for `json.loads(object_pairs_hook=...)`.

    Raises:
        ValueError: a name is there twice.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:80]!r} is there twice")
            seen.add(name)
    return values
