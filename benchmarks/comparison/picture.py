"""The four questions of a comparison as bars: scaling; speed and memory by layout; FLOP/s beside the machine's limit;
the largest model that fits."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.comparison.job import NAMES, Layout
from benchmarks.comparison.results import LABELS, MIB, Results, Row, degrees
from megacore.drawing.canvas import Box, Drawing, Line, Words

_COLORS = {"megacore": "#2f66b0", "torch": "#d9861f", "deepspeed": "#2e8f6b", "megatron-core": "#8b5fb5"}
_SHADES = ("#b9cce4", "#7da3d2", "#2f66b0", "#1c3f70")
_GREY, _LIMIT, _GRID = "#6b7280", "#c2410c", "#e5e7eb"
_LEFT, _WIDTH, _HEIGHT, _GAP = 78.0, 1060.0, 170.0, 86.0


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A panel of grouped bars.

    Attributes:
        title: the question.
        unit: of the values.
        groups: text below each group, and a last line.
        values: of each group, by series; None: no bar.
        colors: by series.
        limits: of each group, drawn as a line above it.
    """

    title: str
    unit: str
    groups: Sequence[tuple[str, str]]
    values: Sequence[dict[str, float | None]]
    colors: dict[str, str]
    limits: Sequence[float] = ()


def picture(results: Results) -> Drawing:
    """All panels below each other."""
    panels = [panel for make in (_scaling, _speed, _memory, _flops, _largest) if (panel := make(results)) is not None]
    drawing = Drawing(title="megacore beside its peers", width=_LEFT + _WIDTH + 24, height=0)
    y = 16.0
    for panel in panels:
        y = _draw(drawing, panel, y)
    drawing.height = y
    return drawing


def _most(results: Results) -> int:
    return max(layout.ranks for layout in results.layouts())


def _scaling(results: Results) -> Bars | None:
    counts = sorted({layout.ranks for layout in results.layouts()})
    of_one = next((row for row in results.rows if row.layout.ranks == 1 and row.side == "megacore"), None)
    kinds = [layout.kind for layout in results.layouts() if layout.ranks == _most(results) and layout.ranks > 1]
    between = {layout.kind for layout in results.layouts() if 1 < layout.ranks < counts[-1]}
    kinds = [kind for kind in kinds if kind in between] or kinds
    if of_one is None or not kinds:
        return None
    values = []
    for kind in kinds:
        by_ranks = {row.layout.ranks: row for row in results.rows if row.side == "megacore" and row.layout.kind == kind}
        by_ranks[1] = of_one
        values.append(
            {
                _ranks(count): by_ranks[count].tokens_per_second(results.sizes) if count in by_ranks else None
                for count in counts
            }
        )
    return Bars(
        title="1. Does megacore's throughput grow with ranks?",
        unit="tokens/s",
        groups=[(NAMES[kind], "") for kind in kinds],
        values=values,
        colors={_ranks(count): _SHADES[-len(counts) :][i] for i, count in enumerate(counts)},
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _by_layout(
    results: Results, title: str, unit: str, value: Callable[[Row], float], *, limited: bool = False
) -> Bars:
    shown = [layout for layout in results.layouts() if layout.ranks == _most(results)]
    sides = results.sides()
    values = [
        {LABELS[side]: None if (row := results.row(side, layout)) is None else value(row) for side in sides}
        for layout in shown
    ]
    limits = [statistics.median(row.limit for row in results.rows if row.layout == layout) / 1e9 for layout in shown]
    return Bars(
        title=title,
        unit=unit,
        groups=[_label(layout) for layout in shown],
        values=values,
        colors={LABELS[side]: _COLORS[side] for side in sides},
        limits=limits if limited else (),
    )


def _speed(results: Results) -> Bars | None:
    title = f"2. Which way is fastest on {_ranks(_most(results))}?"
    return _by_layout(results, title, "tokens/s", lambda row: row.tokens_per_second(results.sizes))


def _memory(results: Results) -> Bars | None:
    title = f"And which takes least memory on {_ranks(_most(results))}?"
    return _by_layout(results, title, "MiB of the fullest rank", lambda row: row.peak / MIB)


def _flops(results: Results) -> Bars | None:
    title = "3. FLOP/s of the model beside what matrix products reach on this machine (the line)"
    return _by_layout(results, title, "GFLOP/s", lambda row: row.flops_per_second(results.sizes) / 1e9, limited=True)


def _largest(results: Results) -> Bars | None:
    if not results.largest:
        return None
    shown = list(dict.fromkeys(one.layout for one in results.largest))
    sides = [side for side in LABELS if any(one.side == side for one in results.largest)]
    sizes = {(one.side, one.layout): one.parameters / 1e6 for one in results.largest}
    return Bars(
        title=f"4. The largest model that fits {results.limit_bytes / MIB:,.0f} MiB per rank",
        unit="million parameters",
        groups=[_label(layout) for layout in shown],
        values=[{LABELS[side]: sizes.get((side, layout)) for side in sides} for layout in shown],
        colors={LABELS[side]: _COLORS[side] for side in sides},
    )


def _label(layout: Layout) -> tuple[str, str]:
    named = degrees(layout)
    return NAMES[layout.kind], "" if named.isdigit() else named


def _draw(drawing: Drawing, panel: Bars, y: float) -> float:
    """One panel from a height on; the height below it."""
    marks = drawing.marks
    marks.append(Words(x=_LEFT, y=y + 6, text=panel.title, size=15, bold=True))
    x = _LEFT
    for name, color in panel.colors.items():
        marks.append(Box(x=x, y=y + 22, width=11, height=11, fill=color))
        marks.append(Words(x=x + 16, y=y + 28, text=name, size=12, color=_GREY))
        x += 34 + 7.2 * len(name)
    top, bottom = y + 50, y + 50 + _HEIGHT
    values = [value for group in panel.values for value in group.values() if value is not None]
    most = max([*values, *panel.limits]) * 1.08
    step = _round_step(most / 5)
    for number in range(int(most / step) + 1):
        height = bottom - _HEIGHT * number * step / most
        marks.append(Line(x1=_LEFT, y1=height, x2=_LEFT + _WIDTH, y2=height, color=_GRID))
        marks.append(Words(x=_LEFT - 8, y=height, text=f"{number * step:,.0f}", size=11, anchor="end", color=_GREY))
    marks.append(Words(x=_LEFT + _WIDTH, y=top - 22, text=panel.unit, size=12, anchor="end", color=_GREY))
    group = _WIDTH / len(panel.groups)
    bar = min(0.8 * group / len(panel.colors), 30.0)
    for number, (labels, of_group) in enumerate(zip(panel.groups, panel.values, strict=True)):
        middle = _LEFT + group * (number + 0.5)
        left = middle - bar * len(of_group) / 2
        for place, (series, value) in enumerate(of_group.items()):
            if value is None:
                continue
            height = _HEIGHT * value / most
            note = f"{' '.join(filter(None, labels))}, {series}: {value:,.0f} {panel.unit}"
            color = panel.colors[series]
            marks.append(
                Box(x=left + place * bar, y=bottom - height, width=bar - 2, height=height, fill=color, note=note)
            )
        if panel.limits:
            limit = bottom - _HEIGHT * panel.limits[number] / most
            marks.append(Box(x=middle - 0.42 * group, y=limit - 1, width=0.84 * group, height=2, fill=_LIMIT))
        lines = [
            *textwrap.wrap(labels[0], max(int(group / 6.5), 8), break_long_words=False, break_on_hyphens=False),
            *filter(None, labels[1:]),
        ]
        for line, label in enumerate(lines):
            marks.append(Words(x=middle, y=bottom + 13 + 14 * line, text=label, size=11, anchor="middle"))
    marks.append(Line(x1=_LEFT, y1=bottom, x2=_LEFT + _WIDTH, y2=bottom, color=_GREY))
    return bottom + _GAP


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least so much."""
    power = 10.0 ** (len(str(int(max(least, 1)))) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
