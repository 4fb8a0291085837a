"""The textbook diagram of a pipeline: a row per rank, a box with the microbatch's number per computation, the bubble.
One time line, or several above each other on one time axis, such as a predicted and a measured one. What a rank does
not compute between the start and the end of the pass is shaded: that is the bubble."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from megacore.drawing.canvas import Box, Drawing, Line, Words, wrapped
from megacore.drawing.trace_file import mean_durations
from megacore.pipeline.schedule import Op, Placement, transfers_of
from megacore.pipeline.simulator import Span, Timeline

# Told apart by people who see no red or no green as well, and in print by their brightness.
COLORS = {Op.FORWARD: "#2f66b0", Op.BACKWARD: "#2e8f6b", Op.INPUT_GRAD: "#1f9fb5", Op.WEIGHT_GRAD: "#d9861f"}
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}
_BUBBLE, _BUBBLE_EDGE, _GREY, _WHITE, _INK = "#eef0f3", "#d5d9e0", "#6b7280", "#ffffff", "#1f2430"
_MESSAGE = "#c2410c"
_LEFT, _RIGHT, _TOP = 66.0, 22.0, 14.0
_SMALLEST_BOX, _NARROWEST, _WIDEST = 24.0, 660.0, 1500.0  # pixels; the latter two of the time axis
_WIDEST_FOR_NUMBERS = 2400.0  # where boxes would else have no room for them
_GAP, _GAP_OF_MESSAGES = 4.0, 8.0  # between rows
_LARGEST_NUMBER, _SMALLEST_NUMBER = 12.0, 6.5  # size of the numbers in boxes
_DIGIT = 0.58  # width of a digit, of its size
_MANY_MS = 10_000.0  # from this on an axis in milliseconds is labelled in seconds


class Scale(NamedTuple):
    """From time to pixels."""

    end: float  # of the time line
    pixels: float  # of one unit of time

    @property
    def width(self) -> float:
        return self.end * self.pixels

    def x(self, time: float) -> float:
        """Where a moment is drawn."""
        return _LEFT + time * self.pixels


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A time line with what is said above it."""

    title: str
    bubble: str
    timeline: Timeline  # when which rank computes what
    virtual_stages: int = 1  # stages per rank, which differ in shade
    is_v: bool = False  # whether they are placed as a V
    # Time of a message between stages, to draw each as a line from rank to rank; None: draw none.
    transfer: float | None = None


def diagram(panels: Sequence[Panel], *, unit: str) -> Drawing:
    """The drawing of one or several time lines, all with times of one unit, from the top."""
    end = max(panel.timeline.end for panel in panels)
    spans = list(_spans(panels))
    digits = len(str(max(span.action.microbatch for span in spans)))
    typical = mean_durations(spans, attrgetter("op"))
    width = min(max(end / min(typical.values()) * _SMALLEST_BOX, _NARROWEST), _WIDEST)
    of_stages = mean_durations(spans, attrgetter("op", "stage")).values()
    shortest = min(mean for mean in of_stages if mean > 0)  # a stage may have no weights
    least_box = digits * _DIGIT * _SMALLEST_NUMBER + 2  # the width of one with a number of the smallest size
    width = max(width, min(end / shortest * least_box, _WIDEST_FOR_NUMBERS))
    drawing = Drawing(title="; ".join(f"{panel.title}: {panel.bubble}" for panel in panels), width=0, height=0)
    scale = Scale(end, width / end)
    # The size at which the numbers fit into the boxes of each kind that is large enough for any; 0 if none is.
    sizes = [(duration * scale.pixels - 2) / (digits * _DIGIT) for duration in typical.values()]
    legible = [size for size in sizes if size >= _SMALLEST_NUMBER]
    number_size = min([_LARGEST_NUMBER, *legible]) if legible else 0.0
    y = _TOP
    for panel in panels:
        painter = _Painter(drawing, panel, scale, number_size, digits)
        y = painter.paint(y) + 14
    y = axis(drawing, y - 10, scale, unit=unit)
    right = _legend(drawing, y, panels)
    drawing.width, drawing.height = max(_LEFT + scale.width, right) + _RIGHT, y + 26
    return drawing


def heading(drawing: Drawing, y: float, *, title: str, notes: str, width: float) -> float:
    """A title and what is said below it, in lines of this width; returns where they end."""
    for text in wrapped(title, width, size=15, bold=True):
        drawing.marks.append(Words(x=_LEFT, y=y + 8, text=text, size=15, bold=True))
        y += 19
    for text in wrapped(notes, width, size=12.5):
        drawing.marks.append(Words(x=_LEFT, y=y + 8, text=text, size=12.5, color=_GREY))
        y += 17
    return y + 6


class _Painter:
    """Draws one panel."""

    def __init__(self, drawing: Drawing, panel: Panel, scale: Scale, number_size: float, digits: int) -> None:
        self.drawing, self.marks = drawing, drawing.marks
        self.panel, self.scale, self.number_size, self.digits = panel, scale, number_size, digits
        self.ranks = len(panel.timeline.spans)
        self.row = 26.0 if self.ranks <= 8 else 22.0 if self.ranks <= 16 else 16.0
        self.pitch = self.row + (_GAP if panel.transfer is None else _GAP_OF_MESSAGES)

    def paint(self, y: float) -> float:
        """Draw from a height on; returns where it ends."""
        y = heading(self.drawing, y, title=self.panel.title, notes=self.panel.bubble, width=self.scale.width)
        rows = self.panel.timeline.spans
        if self.panel.transfer is not None:
            for rank in range(len(rows)):
                self._row(y + rank * self.pitch, rank)
            self._messages(y)  # below the boxes, whose numbers they would cross
        for rank, spans in enumerate(rows):
            if self.panel.transfer is None:
                self._row(y + rank * self.pitch, rank)
            for span in spans:
                self._box(y + rank * self.pitch, span)
        return y + self.ranks * self.pitch

    def _messages(self, top: float) -> None:
        """A line for each message, from the end of what made it to its arrival at the other rank."""
        placement = Placement(self.ranks, self.panel.virtual_stages, self.panel.is_v)
        for span in chain.from_iterable(self.panel.timeline.spans):
            transfer = transfers_of(span.action, placement)
            if transfer is None:
                continue
            rank, other = (placement.rank_of(action.stage) for action in transfer)
            y1, y2 = (top + number * self.pitch + self.row / 2 for number in (rank, other))
            x = self.scale.x(span.end)
            width = (span.end + (self.panel.transfer or 0.0) - span.end) * self.scale.pixels
            self.marks.append(Line(x1=x, y1=y1, x2=x + width, y2=y2, color=_MESSAGE))

    def _row(self, y: float, rank: int) -> None:
        self.marks.append(Words(x=_LEFT - 10, y=y + self.row / 2, text=f"rank {rank}", anchor="end"))
        x, width = self.scale.x(0.0), self.panel.timeline.end * self.scale.pixels
        self.marks.append(
            Box(x=x, y=y, width=width, height=self.row, fill=_BUBBLE, edge=_BUBBLE_EDGE, hatched=True, note="bubble")
        )

    def _box(self, y: float, span: Span) -> None:
        x, width = self.scale.x(span.start), (span.end - span.start) * self.scale.pixels
        action = span.action
        fill = _shade(COLORS[action.op], action.stage // self.ranks, self.panel.virtual_stages)
        note = (
            f"{action}: {NAMES[action.op]} of microbatch {action.microbatch} at stage {action.stage}, "
            f"from {span.start:.6g} to {span.end:.6g}"
        )
        edge = _WHITE if width >= 3 else None
        self.marks.append(Box(x=x, y=y, width=width, height=self.row, fill=fill, edge=edge, note=note))
        size = min(self.number_size, self.row * 0.6, (width - 1) / (self.digits * _DIGIT))
        if size >= _SMALLEST_NUMBER:  # the longest number fits: boxes of one width all have their numbers, or none
            ink, middle = _WHITE if _brightness(fill) < 0.6 else _INK, y + self.row / 2
            number = str(action.microbatch)
            self.marks.append(Words(x=x + width / 2, y=middle, text=number, size=size, anchor="middle", color=ink))


def _spans(panels: Sequence[Panel]) -> Iterator[Span]:
    return chain.from_iterable(spans for panel in panels for spans in panel.timeline.spans)


def axis(drawing: Drawing, y: float, scale: Scale, *, unit: str) -> float:
    """A time axis at a height, of a long time in milliseconds with labels in seconds; returns where it ends."""
    shown, part = ("s", 1e-3) if unit == "ms" and scale.end >= _MANY_MS else (unit, 1.0)
    step = _round_step(scale.end / 10)
    drawing.marks.append(Line(x1=_LEFT, y1=y, x2=_LEFT + scale.width, y2=y, color=_GREY))
    for number in range(int(scale.end / step + 1e-9) + 1):
        tick, text = scale.x(number * step), f"{number * step * part:,.10g}"
        drawing.marks.append(Line(x1=tick, y1=y, x2=tick, y2=y + 4, color=_GREY))
        drawing.marks.append(Words(x=tick, y=y + 13, text=text, size=11, anchor="middle", color=_GREY))
    drawing.marks.append(Words(x=_LEFT - 10, y=y + 13, text=shown, size=11, anchor="end", color=_GREY))
    return y + 30


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(drawing: Drawing, y: float, panels: Sequence[Panel]) -> float:
    """What the colours mean; returns where it ends."""
    present = {span.action.op for span in _spans(panels)}
    virtual = max(panel.virtual_stages for panel in panels)
    x = _LEFT
    for op in COLORS:
        if op not in present:
            continue
        for number in range(virtual):
            fill = _shade(COLORS[op], number, virtual)
            drawing.marks.append(Box(x=x, y=y, width=14, height=14, fill=fill))
            x += 14
        drawing.marks.append(Words(x=x + 6, y=y + 7, text=NAMES[op]))
        x += 6 + 6.4 * len(NAMES[op]) + 20
    if any(min(panel.timeline.busy) < panel.timeline.end * (1 - 1e-9) for panel in panels):  # a rank waits
        drawing.marks.append(Box(x=x, y=y, width=14, height=14, fill=_BUBBLE, edge=_BUBBLE_EDGE, hatched=True))
        drawing.marks.append(Words(x=x + 20, y=y + 7, text="bubble"))
        x += 76
    if any(panel.transfer is not None for panel in panels):
        drawing.marks.append(Line(x1=x, y1=y + 14, x2=x + 14, y2=y, color=_MESSAGE))
        drawing.marks.append(Words(x=x + 20, y=y + 7, text="transfer"))
        x += 84
    if virtual > 1:
        text = "later stages of a rank are lighter"
        drawing.marks.append(Words(x=x + 4, y=y + 7, text=text, color=_GREY))
        x += 4 + 6.8 * len(text)
    return x


def _shade(color: str, number: int, count: int) -> str:
    """The colour of a rank's stage: the first as it is, the last mixed with white."""
    share = 0.62 * number / max(count - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(color[1:]))


def _brightness(color: str) -> float:
    red, green, blue = bytes.fromhex(color[1:])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
