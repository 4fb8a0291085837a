"""A pipeline's time line in a terminal: one line per rank, legible without colour. Every computation begins with its
name where there is room for all names: `2F7`, or `F7` without the stage. Where there is not, a column shows the letter
of what takes most of its time, a small one for every second of a rank's stages. Dots are the bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, takewhile
from textwrap import wrap

from rich.text import Text

from megacore.drawing.timelines import NAMES, Panel
from megacore.pipeline.schedule import Action, Op
from megacore.pipeline.simulator import Span, Timeline

LEAST_WIDTH, MOST_WIDTH = 80, 120
_STYLES = {
    Op.FORWARD: ("white on blue", "black on bright_blue"),
    Op.BACKWARD: ("black on green", "black on bright_green"),
    Op.INPUT_GRAD: ("black on cyan", "black on bright_cyan"),
    Op.WEIGHT_GRAD: ("black on yellow", "black on bright_yellow"),
}
_IDLE = "·"
Name = Callable[[Action], str]


def render(panels: Sequence[Panel], columns: int, *, unit: str) -> Text:
    """Panels below each other, on one scale, with a legend; 80 to 120 of the terminal's columns are used."""
    spans = [span for panel in panels for row in panel.timeline.spans for span in row]
    indent = len(f"rank {max(len(panel.timeline.spans) for panel in panels) - 1} ")
    width = min(max(columns, LEAST_WIDTH), MOST_WIDTH)
    scale = _scale(spans, width - indent)
    virtual = max(panel.virtual_stages for panel in panels) > 1
    short = partial(_short, len(panels[0].timeline.spans))
    name = _names_that_fit(spans, scale, [str, short] if virtual else [short])
    lines: list[Text] = []
    for panel in panels:
        lines += [Text(panel.title, "bold"), *map(Text, wrap(panel.bubble, width))]
        lines += _rows(panel.timeline, indent, scale, name)
    legend = Text(" " * indent)
    for op in NAMES:
        if op in {span.action.op for span in spans}:
            legend.append(op.value, _STYLES[op][0]).append(f" {NAMES[op]}  ")
    lines.append(legend.append(f"{_IDLE} bubble"))
    small = "; small letters: every second stage of a rank" if name is not str and virtual else ""
    lines.append(Text(" " * indent + f"one column: {1 / scale:.4g} {unit}{small}"))
    return Text("\n").join(lines)


def _rows(timeline: Timeline, indent: int, scale: float, name: Name | None) -> Iterator[Text]:
    ranks = len(timeline.spans)
    for rank, spans in enumerate(timeline.spans):
        row = (
            _lettered_row(spans, timeline.end, scale, ranks=ranks)
            if name is None
            else _named_row(spans, timeline.end, scale, name=name, ranks=ranks)
        )
        yield Text(f"rank {rank} ".ljust(indent)).append_text(row)


def _scale(spans: Sequence[Span], room: int) -> float:
    """Columns in a unit of time; whole columns for the shortest computation, so that equal ones look equal."""
    shortest = min(span.end - span.start for span in spans)
    widest = room / max(span.end for span in spans)
    return int(shortest * widest + 1e-9) / shortest if shortest * widest >= 1 else widest


def _names_that_fit(spans: Sequence[Span], scale: float, names: Sequence[Name]) -> Name | None:
    """The first, longest names for which there is room everywhere."""
    for name in names:
        if all(_columns(span, scale) >= len(name(span.action)) for span in spans):
            return name
    return None


def _short(ranks: int, action: Action) -> str:
    return f"{_letter(action, ranks)}{action.microbatch}"


def _letter(action: Action, ranks: int) -> str:
    return action.op.value.lower() if action.stage // ranks % 2 else action.op.value


def _columns(span: Span, scale: float) -> int:
    return round(span.end * scale) - round(span.start * scale)


def _named_row(spans: Sequence[Span], end: float, scale: float, *, name: Name, ranks: int) -> Text:
    row, at = Text(), 0
    for span in spans:
        first, stop = round(span.start * scale), round(span.end * scale)
        row.append(_IDLE * (first - at), "dim")
        row.append(name(span.action).ljust(stop - first, "-"), _style(span, ranks))
        at = stop
    return row.append(_IDLE * (round(end * scale) - at), "dim")


def _lettered_row(spans: Sequence[Span], end: float, scale: float, *, ranks: int) -> Text:
    """For each column what takes most of its time."""
    row, number = Text(), 0
    for column in range(round(end * scale)):
        start, stop = column / scale, (column + 1) / scale
        most, longest, busy = (_IDLE, "dim"), 0.0, 0.0
        while number < len(spans) and spans[number].end <= start:
            number += 1
        for span in takewhile(lambda span: span.start < stop, islice(spans, number, None)):  # noqa: B023
            inside = min(span.end, stop) - max(span.start, start)
            busy += inside
            if inside > longest:
                most, longest = (_letter(span.action, ranks), _style(span, ranks)), inside
        row.append(*(most if busy >= 0.5 / scale else (_IDLE, "dim")))
    return row


def _style(span: Span, ranks: int) -> str:
    return _STYLES[span.action.op][span.action.stage // ranks % 2]
