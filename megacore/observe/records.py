"""Reads files of JSON lines, such as metrics.jsonl and events.jsonl: a run may be writing the last line just now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

_LONGEST_LINE = 1 << 24


def json_lines(file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file, each with its object; None for a line that is none, such as a cut-off one."""
    while line := file.readline(_LONGEST_LINE):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        yield line, record if isinstance(record, dict) else None
