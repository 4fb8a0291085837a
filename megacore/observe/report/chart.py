"""Line charts and bars as inline SVG, in the colours of the page (CSS variables), which follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megacore.observe.report.series import Point, decades, decimated, quantile, short, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 10.0, 40.0
_LOGARITHMIC_FROM = 50.0  # of the highest value over the median: a linear axis would show nothing but the spike


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a chart."""

    name: str  # for the legend
    style: str  # class of the line: main, soft, second or dots
    points: Sequence[Point]  # by ascending x


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something at a point of the x axis: a resume, a skipped step."""

    x: float  # where, or where it begins
    style: str  # class: resume, spike, skip, or rollback
    text: str  # what a browser shows under the pointer
    end: float | None = None  # where a range ends


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart."""

    title: str  # for those who cannot see it
    curves: Sequence[Curve]  # drawn in order
    x_name: str  # name of the x axis
    marks: Sequence[Mark] = ()  # on the x axis
    level: tuple[float, str] | None = None  # a horizontal line, with its name
    width: float = 560.0  # of the view box, in pixels
    height: float = 220.0
    form: Callable[[float], str] = short  # writes a value of the y axis
    from_zero: bool = False  # whether the y axis begins at 0


def to_svg(chart: Chart) -> str:
    """The chart as an SVG element; a note where there is nothing to draw."""
    numbers = [point.y for curve in chart.curves for point in curve.points if point.y is not None]
    if not numbers:
        return '<p class="none">nothing was logged</p>'
    return "".join(_Painter(chart, numbers).paint())


class _Painter:
    def __init__(self, chart: Chart, numbers: Sequence[float]) -> None:
        self.chart = chart
        xs = [point.x for curve in chart.curves for point in curve.points]
        self.x_low, self.x_high = min(xs), max(xs)
        low, high, middle = min(numbers), max(numbers), quantile(numbers, 0.5)
        if chart.level is not None and chart.level[0] <= 4 * high:
            high = max(high, chart.level[0])
        self.logarithmic = low > 0 and high > _LOGARITHMIC_FROM * middle
        if self.logarithmic:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            self.low, self.high = (min(low, 0.0) if chart.from_zero else low), high
        room = (self.high - self.low) * 0.06 or abs(self.high) * 0.1 or 1.0
        self.low -= 0.0 if chart.from_zero and low >= 0 and not self.logarithmic else room
        self.high += room
        self.right, self.bottom = chart.width - _RIGHT, chart.height - _BOTTOM

    def paint(self) -> Iterator[str]:
        chart = self.chart
        size = f'viewBox="0 0 {chart.width:g} {chart.height:g}"'
        yield f'<svg {size} role="img" aria-label="{escape(chart.title)}"><title>{escape(chart.title)}</title>'
        yield from self.axes()
        for mark in chart.marks:
            yield self.mark(mark)
        for curve in chart.curves:
            yield from self.curve(curve)
        if chart.level is not None:
            yield from self.level(*chart.level)
        yield "</svg>"

    def axes(self) -> Iterator[str]:
        low, high = (10**self.low, 10**self.high) if self.logarithmic else (self.low, self.high)
        for value in decades(low, high) if self.logarithmic else ticks(low, high, 4):
            y = self.y(value)
            yield f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{self.right:g}"/>'
            label = escape(self.chart.form(value))
            yield f'<text class="tick" x="{_LEFT - 8:g}" y="{y + 3.8:.1f}" text-anchor="end">{label}</text>'
        for value in ticks(self.x_low, self.x_high, 5 if self.chart.width < 700 else 9):
            label = escape(short(value))
            x = self.x(value)
            anchor = "end" if x > self.right - 12 else "start" if x < _LEFT + 4 else "middle"
            yield f'<text class="tick" x="{x:.1f}" y="{self.bottom + 16:g}" text-anchor="{anchor}">{label}</text>'
        yield f'<path class="axis" d="M{_LEFT:g} {self.bottom:g}H{self.right:g}"/>'
        name = escape(self.chart.x_name)
        yield f'<text class="tick" x="{self.right:g}" y="{self.bottom + 32:g}" text-anchor="end">{name}</text>'

    def curve(self, curve: Curve) -> Iterator[str]:
        points = decimated(curve.points, int(self.right - _LEFT))
        if curve.style == "dots" or sum(point.y is not None for point in points) == 1:
            for point in points:
                if point.y is not None:
                    yield f'<circle class="{curve.style}" cx="{self.x(point.x):.1f}" cy="{self.y(point.y):.1f}" r="3">'
                    yield f"<title>{escape(curve.name)} {escape(self.chart.form(point.y))}</title></circle>"
            return
        path, pen_down = [], False
        for point in points:
            if point.y is not None:
                path.append(f"{'L' if pen_down else 'M'}{self.x(point.x):.1f} {self.y(point.y):.1f}")
            pen_down = point.y is not None
        yield f'<path class="line {curve.style}" d="{"".join(path)}"/>'

    def level(self, value: float, name: str) -> Iterator[str]:
        y = self.y(value)
        if _TOP <= y <= self.bottom:
            yield f'<path class="level" d="M{_LEFT:g} {y:.1f}H{self.right:g}"/>'
            yield f'<text class="tick halo" x="{self.right:g}" y="{y - 5:.1f}" text-anchor="end">{escape(name)}</text>'

    def mark(self, mark: Mark) -> str:
        x = self.x(min(max(mark.x, self.x_low), self.x_high))
        title = f"<title>{escape(mark.text)}</title>"
        if mark.end is not None:
            width = max(self.x(min(mark.end, self.x_high)) - x, 1.0)
            height = self.bottom - _TOP
            box = f'x="{x:.1f}" y="{_TOP:g}" width="{width:.1f}" height="{height:g}"'
            return f'<rect class="{mark.style}" {box}>{title}</rect>'
        if mark.style in ("skip", "spike"):
            down = self.bottom
            return f'<path class="{mark.style}" d="M{x:.1f} {down:g}l-4 -8h8z">{title}</path>'
        return f'<path class="{mark.style}" d="M{x:.1f} {_TOP:g}V{self.bottom:g}">{title}</path>'

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        return _LEFT + share * (self.right - _LEFT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.logarithmic else value
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - _TOP)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A measured value beside a predicted one, in bytes; None: nothing was predicted."""

    name: str
    measured: float
    predicted: float | None


def bars_to_svg(bars: Sequence[Bar], largest: float, title: str) -> str:
    """Horizontal bars of GiB, each with a tick where it was predicted; `title` is for those who cannot see it."""
    width, row, left, right = 560.0, 22.0, 128.0, 150.0
    height = row * len(bars) + 6
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">']
    for number, bar in enumerate(bars):
        y, scale = number * row + 4, (width - left - right) / (largest or 1.0)
        measured = bar.measured * scale
        of_predicted = "" if bar.predicted is None else f" of {bar.predicted / 2**30:.2f}"
        figures = f"{bar.measured / 2**30:.2f}{of_predicted} GiB"
        parts.append(
            f'<text class="tick" x="{left - 8:g}" y="{y + 11.5:g}" text-anchor="end">{escape(bar.name)}</text>'
        )
        parts.append(
            f'<rect class="track" x="{left:g}" y="{y:g}" width="{width - left - right:g}" height="14" rx="3"/>'
        )
        parts.append(f'<rect class="bar" x="{left:g}" y="{y:g}" width="{measured:.1f}" height="14" rx="3"/>')
        if bar.predicted is not None:
            parts.append(f'<path class="expected" d="M{left + bar.predicted * scale:.1f} {y - 3:g}v20"/>')
        parts.append(f'<text class="tick" x="{width - right + 10:g}" y="{y + 11.5:g}">{figures}</text>')
    return "".join(parts) + "</svg>"
