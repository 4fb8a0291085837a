"""The notation of the factors of --rope-scaling longrope: a number for each rotated pair of dimensions."""

from __future__ import annotations

import math

from megacore.config.numbers import parse_float


def parse_factors(text: str) -> tuple[float, ...]:
    """The numbers of a text like `1.0,1.25,4`. Raises ValueError for one that is not above 0."""
    factors = []
    for part in text.split(","):
        factor = parse_float(part.strip())
        if not 0.0 < factor < math.inf:
            raise ValueError(f"{part.strip()[:40]!r} is not above 0 and finite")
        factors.append(factor)
    return tuple(factors)


def written_factors(factors: list[float]) -> str:
    """A list in that notation, from which `parse_factors` reads the same numbers."""
    return ",".join(repr(float(factor)) for factor in factors)
