"""The notation of --layer-pattern: what mixes positions in each block."""

from __future__ import annotations

import re

from megacore.config.messages import one_of
from megacore.errors import UserError

WINDOW, FULL, WITHOUT_POSITIONS, LINEAR, MAMBA = "w", "f", "n", "l", "m"
_LONGEST = 10_000


def parse_pattern(text: str) -> str:
    """The kinds of the blocks of one period, a letter each, of a text like `5*w,f`. Raises UserError."""
    kinds = ""
    for part in text.split(","):
        match = re.fullmatch(r"(?:([1-9][0-9]{0,4})\*)?([wfnlm])", part.strip())
        if match is None:
            raise UserError(
                f"--layer-pattern {text}: '{part[:40]}' is not known: use "
                f"{one_of([WINDOW, FULL, WITHOUT_POSITIONS, LINEAR, MAMBA])}, with a number before it for several, for "
                "example 3*l,f"
            )
        kinds += match[2] * int(match[1] or 1)
    if len(kinds) > _LONGEST:
        raise UserError(f"--layer-pattern {text} is longer than {_LONGEST:,} blocks: use a shorter one")
    return kinds


def pattern_of(kinds: str) -> str:
    """The shortest notation of the kinds of a model's blocks, a letter each."""
    period = next(size for size in range(1, len(kinds) + 1) if repeated(kinds[:size], len(kinds)) == kinds)
    runs = [run[0] for run in re.finditer(r"(.)\1*", kinds[:period])]
    return ",".join(run if len(run) == 1 else f"{len(run)}*{run[0]}" for run in runs)


def repeated(kinds: str, count: int) -> str:
    """The kinds of `count` blocks, by repeating those of a period."""
    return (kinds * -(-count // len(kinds)))[:count]
