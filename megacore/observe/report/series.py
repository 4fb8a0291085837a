"""Curves as a page needs them: thinned out without losing a spike, and smoothed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """A point of a curve; y is None where there is no finite number."""

    x: float
    y: float | None


LARGEST = 1e100
"""A value beyond it is not drawn: sums and differences of such values would overflow."""


def finite(value: object) -> float | None:
    """The value if it is a number that can be drawn: finite, and no larger than LARGEST; else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None  # type: ignore[arg-type]


def decimated(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most two points per bucket of the x axis, its lowest and its highest, in order. A bucket without any number is
    one point without a number, so that the gap stays visible."""
    if len(points) <= 2 * buckets:
        return list(points)
    first, width = points[0].x, (points[-1].x - points[0].x) / buckets or 1.0
    kept: list[Point] = []
    start = 0
    for number in range(buckets):
        stop = start
        while stop < len(points) and (number == buckets - 1 or points[stop].x < first + (number + 1) * width):
            stop += 1
        kept += _extremes(points[start:stop])
        start = stop
    return kept


def _extremes(points: Sequence[Point]) -> Iterable[Point]:
    numbers = [point for point in points if point.y is not None]
    if not numbers:
        return points[:1]
    low, high = min(numbers, key=_y), max(numbers, key=_y)
    return [low] if low is high else sorted((low, high))


def _y(point: Point) -> float:
    assert point.y is not None
    return point.y


def smoothed(points: Sequence[Point], span: float) -> list[Point]:
    """The mean of the numbers within `span` points around each point; fewer near the ends, so that the curve
    follows."""
    sums, counts = [0.0], [0]
    for point in points:
        sums.append(sums[-1] + (point.y or 0.0))
        counts.append(counts[-1] + (point.y is not None))
    reach, result = int(span / 2), []
    for position, point in enumerate(points):
        here = min(reach, position)
        low, high = position - here, min(position + here + 1, len(points))
        count = counts[high] - counts[low]
        result.append(Point(point.x, None if point.y is None else (sums[high] - sums[low]) / count))
    return result


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies; there is one at least."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """A number in a few characters: 1.25M, 0.031, 3e-5."""
    size = abs(value)
    for unit, letter in _UNITS:
        if unit <= size < 1e18:
            return f"{value / unit:.3g}{letter}"
    if size and (size < 1e-3 or size >= 1e18):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers within [low, high], about `count` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], at most eight; both are above 0."""
    powers = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    return [10.0**power for power in powers[:: max(1, math.ceil(len(powers) / 8))]]
