"""Lines of JSON, as metrics.jsonl and events.jsonl have them: a run may be writing the last one just now."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
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


def finite(value: Any) -> Any:
    """The value with None for each number in it that is not finite: JSON has none of these."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
