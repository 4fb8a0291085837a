"""Numbers as a user types them: ASCII digits only, where `int` and `float` also take spaces and other scripts' digits.
Single underscores may stand between the digits of a whole number, as `int` has it."""

from __future__ import annotations

import contextlib
import math
import re

_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE)

_UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "b": 10**9}


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
    """The whole numbers next to the number that a text spells, the one that is meant first; none where it spells no
    finite one. A unit may follow it: 1.5M is 1,500,000, and 4k is 4,096 or 4,000."""
    bare, unit = (text[:-1], _UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else (text, 1)
    try:
        number = round(parse_float(bare) * unit, 6)
        found = sorted({math.floor(number), math.ceil(number)})
    except (ValueError, OverflowError):  # no number, NaN, or infinite
        return []
    count = number / 1000
    is_binary = unit == 1000 and count >= 1 and math.log2(count).is_integer()  # 128k, not 100k
    return [int(count) * 1024, *found] if is_binary else found
