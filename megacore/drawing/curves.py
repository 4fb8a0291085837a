"""Curves over a number, on a linear or a logarithmic axis: learning rates over steps, losses over learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megacore.drawing.canvas import Box, Drawing, Line, Words

_WIDTH, _HEIGHT = 760.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 20.0, 34.0, 40.0
_COLORS = ("#2f6fb5", "#c8553d", "#3f8f5f", "#8a5fb0")
_GRID, _PALE = "#e3e6eb", "#9db8d6"
_TICKS = 5
_MARGIN = 20.0  # within the frame, for dots and their names


class Dot(NamedTuple):
    """A point by itself."""

    x: float
    y: float
    note: str = ""  # shown where a pointer rests on it
    fill: str = _COLORS[1]
    name: str = ""  # below it


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve."""

    title: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending; where y is not finite, the curve has a gap
    marked: float | None = None  # an x that a vertical line marks, or None
    others: Sequence[Sequence[tuple[float, float]]] = ()  # thinner in color, over the same x or a part of it
    dots: Sequence[Dot] = ()


def curves(title: str, panels: Sequence[Curve], *, x_title: str, logarithmic: bool = False) -> Drawing:
    """One panel under the other, each with one curve of two points or more and an axis of its own. `logarithmic`: the
    axis of x is; x is then positive."""
    drawing = Drawing(title=title, width=_WIDTH, height=len(panels) * _HEIGHT)
    for number, curve in enumerate(panels):
        _panel(drawing, curve, top=number * _HEIGHT, color=_COLORS[number % len(_COLORS)], logarithmic=logarithmic)
        x, y = _WIDTH - _RIGHT, (number + 1) * _HEIGHT - 8.0
        drawing.marks.append(Words(x=x, y=y, text=x_title, anchor="end"))
    return drawing


def _panel(drawing: Drawing, curve: Curve, *, top: float, color: str, logarithmic: bool) -> None:
    left, right, upper, lower = _LEFT, _WIDTH - _RIGHT, top + _TOP, top + _HEIGHT - _BOTTOM
    margin = _MARGIN if curve.dots else 0.0
    alone = [(dot.x, dot.y) for dot in curve.dots]
    begin, end = _ends([x for x, _ in (*curve.points, *alone)])
    low, high = _ends([y for line in (curve.points, alone, *curve.others) for _, y in line])

    def across(x: float) -> float:
        first, last, at = map(math.log, (begin, end, x)) if logarithmic else (begin, end, x)
        return left + margin + (right - left - 2 * margin) * (at - first) / (last - first)

    def down(y: float) -> float:
        return lower - margin - (lower - upper - 2 * margin) * (y - low) / (high - low)

    marks = drawing.marks
    marks.append(Words(x=left, y=top + 16.0, text=curve.title, bold=True))
    for y, text in _round(low, high):
        marks.append(Line(x1=left, y1=down(y), x2=right, y2=down(y), color=_GRID))
        marks.append(Words(x=left - 8.0, y=down(y), text=text, anchor="end", size=11.0))
    powers = (begin * (end / begin) ** (tick / (_TICKS - 1)) for tick in range(_TICKS)) if logarithmic else ()
    for x, text in ((x, _shown(x)) for x in powers) if logarithmic else _round(begin, end):
        marks.append(Words(x=across(x), y=lower + 14.0, text=text, anchor="middle", size=11.0))
    marks.append(Box(x=left, y=upper, width=right - left, height=lower - upper, fill="none", edge="#9aa2af"))
    if curve.marked is not None:
        x = across(curve.marked)
        marks.append(Line(x1=x, y1=upper, x2=x, y2=lower, color=_COLORS[1]))
        marks.append(Words(x=x + 4.0, y=upper + 10.0, text=f"{curve.marked:.2g}", color=_COLORS[1]))
    for line in (*curve.others, curve.points):
        shade = color if line is curve.points else _PALE
        for (x1, y1), (x2, y2) in pairwise(line):
            if math.isfinite(y1 + y2):
                marks.append(Line(x1=across(x1), y1=down(y1), x2=across(x2), y2=down(y2), color=shade))
    for x, y, note, fill, name in curve.dots:
        marks.append(Box(x=across(x) - 2, y=down(y) - 2, width=4.0, height=4.0, fill=fill, note=note))
        if name:
            marks.append(Words(x=across(x) - 10.0, y=down(y) + 11.0, text=name, anchor="middle", size=11.0, color=fill))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest finite one, or what is around a single one."""
    finite = list(filter(math.isfinite, values)) or [0.0, 1.0]
    low, high = min(finite), max(finite)
    return (low, high) if high - low > 1e-300 else (low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12)


def _round(low: float, high: float) -> Iterator[tuple[float, str]]:
    """Four to ten round numbers, multiples of 1, 2 or 5 times a power of ten, with the decimals of that power; in
    scientific notation where they would be long."""
    exponent, most = math.floor(math.log10((high - low) / 4)), max(abs(low), abs(high))
    step = next(factor for factor in (5, 2, 1) if (high - low) / factor > 3.999 * 10.0**exponent) * 10.0**exponent
    ticks = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    digits = math.floor(math.log10(most)) - exponent + 1
    is_short = exponent >= -7 and most < 1e9
    return ((tick, f"{tick:,.{max(-exponent, 0)}f}" if is_short else f"{tick:.{digits}g}") for tick in ticks)


def _shown(x: float) -> str:
    return f"{x:,.0f}" if 100 <= x < 1e6 else f"{x:.3g}"
