"""Numbers as a user types them: ASCII digits only, where `int` and `float` also take spaces and other scripts' digits.
Single underscores may stand between the digits of a whole number, as `int` has it."""

from __future__ import annotations

import contextlib
import math
import re

_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE)


def parse_int(text: str) -> int:
    """The whole number that a text spells. Raises ValueError, for thousands of digits too."""
    if not _INT.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def parse_float(text: str) -> float:
    """The number that a text spells, which may be infinite or NaN. Raises ValueError where it spells none."""
    if not _FLOAT.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a number")
    return float(text)


def is_number(text: str) -> bool:
    """Whether a word is a number."""
    with contextlib.suppress(ValueError):
        return parse_float(text) is not None
    return False


def nearest_ints(text: str) -> list[int]:
    """The whole numbers next to the number that a text spells, in order; none where it spells no finite one."""
    try:
        number = parse_float(text)
        return sorted({math.floor(number), math.ceil(number)})
    except (ValueError, OverflowError):  # no number, NaN, or infinite
        return []
