"""How a refusal says what would do instead.

Lists of values, divisors, nearest multiples and the name that was probably meant, so that every message of config.py
and cli.py reads alike: `--tp 3 must divide --num-attention-heads 16: use 1, 2, 4, 8 or 16`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


def number(value: float) -> str:
    """A number as a user would type it."""
    return str(value) if isinstance(value, int) else f"{value:g}" if float(f"{value:g}") == value else repr(value)


def one_of(values: Sequence[object]) -> str:
    """`1, 2, 4 or 8`."""
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def divisors(n: int, *, near: int | None = None, most: int = 10) -> list[int]:
    """The divisors of n in order; the `most` nearest ones where there are too many to read."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    found = sorted({*small, *(n // d for d in small)})
    if len(found) <= most:
        return found
    return sorted(sorted(found, key=lambda d: abs(d - (n if near is None else near)))[:most])


def nearest_multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` just below and just above a value that is not one itself."""
    below = value // of * of
    return [m for m in (below, below + of) if m > 0]


def nearest_name(given: str, known: Iterable[str]) -> str | None:
    """The known name that `given` was probably meant to be, None where none is near."""
    bare = {name.lower().lstrip("-"): name for name in known}  # dashes in front would count as likeness
    asked = given.lower().lstrip("-")
    near = difflib.get_close_matches(asked, bare, n=1, cutoff=0.6)
    if not near and len(asked) >= 3:
        near = sorted((name for name in bare if asked in name), key=len)
    return bare[near[0]] if near else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)`, empty where no known name is near."""
    near = nearest_name(given, known)
    return f" (did you mean {near}?)" if near else ""


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`1 problem`, `3 problems`."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"
