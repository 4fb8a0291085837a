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
    points: Sequence[tuple[float, float]]  # (x, y), x ascending; y is finite
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
    alone = [(dot.x, dot.y) for dot in curve.dots]
    begin, end = _ends([x for x, _ in (*curve.points, *alone)])
    low, high = _ends([y for line in (curve.points, alone, *curve.others) for _, y in line])

    def across(x: float) -> float:
        first, last, at = map(math.log, (begin, end, x)) if logarithmic else (begin, end, x)
        return left + (right - left) * (at - first) / (last - first)

    def down(y: float) -> float:
        return lower - (lower - upper) * (y - low) / (high - low)

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
            marks.append(Line(x1=across(x1), y1=down(y1), x2=across(x2), y2=down(y2), color=shade))
    for x, y, note, fill, name in curve.dots:
        marks.append(Box(x=across(x) - 2, y=down(y) - 2, width=4.0, height=4.0, fill=fill, note=note))
        if name:
            marks.append(Words(x=across(x) - 10.0, y=down(y) + 11.0, text=name, anchor="middle", size=11.0, color=fill))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest, or what is around a single one."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12)


def _round(low: float, high: float) -> Iterator[tuple[float, str]]:
    """Four to ten round numbers, multiples of 1, 2 or 5 times a power of ten, with as many decimals for each as the one
    that needs most."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (5, 2, 1) if (high - low) / (factor * power) >= 4)
    ticks = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    decimals = max((len(f"{tick:.10g}".partition(".")[2]) for tick in ticks), default=0)
    return ((tick, f"{tick:,.{decimals}f}") for tick in ticks)


def _shown(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
