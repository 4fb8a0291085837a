"""Pictures of a plan: the pipeline's time line with its transfers, every rank's memory over it, and a search.

The time line is drawn by picture.py, which draws every schedule; all become files by canvas.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.drawing.canvas import Box, Drawing, Line, Words, wrapped
from megacore.drawing.curves import Curve, Dot, curves
from megacore.drawing.timelines import Panel, Scale, axis, diagram, heading
from megacore.pipeline.schedule import Op
from megacore.pipeline.schedule_file import placement
from megacore.pipeline.simulator import Timeline
from megacore.plan.memory import RankMemory
from megacore.plan.plan_report import four_digits
from megacore.plan.planner import Plan, memory_with, rank_kinds
from megacore.plan.search import Found, Layout
from megacore.plan.size_unit import SizeUnit, memory_unit, size_unit
from megacore.plan.stage_time import speed_of
from megacore.plan.step_time import pipeline_costs, timeline

_GREY, _LIMIT, _DOT = "#6b7280", "#c2410c", "#b8bfca"
_USED, _KEPT = "#2f66b0", "#9db7d9"  # memory: state, activations
_KINDS = (
    (_USED, "weights, gradients, optimizer, buffers"),
    (_KEPT, "activations"),
)
_LEFT, _TOP, _WIDTH = 66.0, 14.0, 1000.0
_PEAK = 120.0  # for the peaks beside the rows
_TALL_ROWS = 16  # ranks of a memory picture with tall rows, one each; of more ranks, those that are alike share one
_SLOWEST = 4  # times the fastest layout of a search: slower ones are not drawn
_NUMBERED = 12  # layouts of the frontier, the fastest ones, that have a number and are listed under the picture
_ROUNDS = 2.0  # microbatches per rank that are drawn
_FEWEST = 8  # the same in all, if there are as many


class _Drawn(NamedTuple):
    """What is drawn of a step.

    Attributes:
        timeline: of a step with as many microbatches as can be told apart, in milliseconds.
        microbatches: their number.
        transfer: time of a transfer between two stages, in milliseconds.
        bubble: of the busiest rank, as a share of the time line.
    """

    timeline: Timeline
    microbatches: int
    transfer: float
    bubble: float


def _drawn(plan: Plan) -> _Drawn:
    config, count = plan.config, _count(plan.config)
    costs = pipeline_costs(config, plan.time.stages, speed_of(config, plan.cluster, "expected")).times(1e3)
    drawn, instant = timeline(config, costs, count), timeline(config, replace(costs, transfer=0.0), count)
    bubble = max(instant.end - max(instant.busy), 0.0) / drawn.end
    return _Drawn(drawn, count, costs.transfer, bubble)


def _count(config: ResolvedConfig) -> int:
    """Microbatches to draw of a step."""
    m, p = config.microbatches, config.parallel.pp
    if config.parallel.schedule_csv is not None:
        return m
    count = min(m, max(round(_ROUNDS * p), _FEWEST))
    if config.parallel.schedule == "interleaved":  # of whole rounds
        return max(count // p * p, min(p, m))
    return count


def _microbatches(plan: Plan, drawn: _Drawn) -> str:
    """What is drawn, in words."""
    m = plan.config.microbatches
    if drawn.microbatches == m:
        return f"{m:,} microbatch{'es' * (m > 1)}"
    return f"a step with {counted(drawn.microbatches, 'microbatch', 'microbatches')} in place of {m:,}"


def timeline_picture(plan: Plan) -> Drawing:
    """When each pipeline rank computes what, with its transfers as lines to the next rank."""
    drawn = _drawn(plan)
    line, count, transfer, bubble = drawn
    config, whole = plan.config, plan.time.bubble / plan.time.seconds
    said = f"step {four_digits(plan.time.seconds)} s"
    is_pipeline = config.parallel.pp > 1
    if is_pipeline:
        three_digits = f"{transfer:,.0f}" if transfer >= 100 else f"{transfer:#.3g}"
        said = f"{said}, bubble of the busiest rank {whole:.1%} of it; a transfer takes {three_digits} ms"
    if count < config.microbatches:
        said = f"with {config.microbatches:,} microbatches: {said}"
        said = f"bubble of the busiest rank {bubble:.1%} of what is drawn; {said}" if is_pipeline else said
    schedule = "own schedule" if config.parallel.schedule_csv is not None else config.parallel.schedule_name
    ranks = f"{config.parallel.pp} ranks" if is_pipeline else "one pipeline rank"
    ranks = ranks if config.parallel.is_one_by_one else f"{schedule}, {ranks}"
    panel = Panel(
        title=f"predicted: {ranks}, {plan.cluster.name}: {_microbatches(plan, drawn)}",
        bubble=said,
        timeline=line,
        virtual_stages=config.parallel.virtual_stages,
        is_v=placement(config.parallel).is_v,
        transfer=transfer if is_pipeline else None,
    )
    return diagram([panel], unit="ms")


# ---- memory over time ------------------------------------------------------------------------------------------------


def memory_picture(plan: Plan) -> Drawing:
    """Every rank's memory over the pass: state below, activations of the microbatches in flight above it. Where there
    are many ranks, one row stands for consecutive ranks that take the same."""
    drawn = _drawn(plan)
    line = drawn.timeline
    scale = Scale(line.end, _WIDTH / line.end)
    memory = memory_with(plan, drawn.microbatches)
    fullest = max(rank.expected for rank in memory)
    top = max(plan.capacity, fullest)
    unit = memory_unit(memory)
    if fullest < plan.capacity / 4:  # the bars would be lines
        top = fullest
    is_limited = top >= plan.capacity
    usable = size_unit([plan.capacity]).text(plan.capacity)
    title = f"predicted memory per rank; usable: {usable} ({plan.cluster.name})"
    drawing = Drawing(title=title, width=_LEFT + scale.width + _PEAK, height=0)
    notes = [_microbatches(plan, drawn)]
    whole = memory_unit(plan.memory).text(plan.fullest.expected)
    if unit.text(fullest) != whole:
        notes.append(f"the peak grows with the microbatches: {whole} with {plan.config.microbatches:,}")
    is_tall = len(memory) <= _TALL_ROWS
    rows = [(range(n, n + 1), rank) for n, rank in enumerate(memory)] if is_tall else list(rank_kinds(memory))
    if len(rows) < len(memory):
        notes.append("a row of several ranks has the times of the first one")
    notes.append(f"the full row height is {unit.text(top)}")
    y = heading(drawing, _TOP, title=title, notes="; ".join(notes), width=scale.width) + 4
    row = 46.0 if is_tall else 30.0
    for ranks, rank in rows:
        words = Words(x=_LEFT - 10, y=y + row / 2, text=_named(ranks), anchor="end")
        drawing.marks.append(words)
        changes = held_over_time(rank.pp_rank, line, len(memory))
        _memory_row(drawing, plan, rank, changes, unit=unit, area=_Area(y, row, scale, top))
        y += row + 8
    y = axis(drawing, y, scale, unit="ms")
    x = _LEFT
    for fill, text in _KINDS:
        drawing.marks.append(Box(x=x, y=y, width=14, height=14, fill=fill))
        drawing.marks.append(Words(x=x + 20, y=y + 7, text=text))
        x += 20 + 5.8 * len(text) + 20
    if is_limited:
        drawing.marks.append(Line(x1=x, y1=y + 7, x2=x + 14, y2=y + 7, color=_LIMIT))
        drawing.marks.append(Words(x=x + 20, y=y + 7, text="usable memory"))
    drawing.height = y + 26
    return drawing


def _named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


class Held(NamedTuple):
    """Microbatches whose activations a rank keeps from a moment on, by its stages: until the gradients of weights."""

    start: float
    microbatches: tuple[int, ...]


def held_over_time(rank: int, line: Timeline, ranks: int) -> list[Held]:
    """What a rank keeps, at each moment at which that changes."""
    spans = line.spans[rank]
    stages = max(span.action.stage // ranks for span in spans) + 1
    held = [0] * stages
    changes = [Held(0.0, tuple(held))]
    for span in spans:
        stage = span.action.stage // ranks
        if span.action.op is Op.FORWARD:
            held[stage] += 1
        elif span.action.op is not Op.INPUT_GRAD:
            held[stage] -= 1
        moment = span.start if span.action.op is Op.FORWARD else span.end
        changes.append(Held(moment, tuple(held)))
    return changes


class _Area(NamedTuple):
    """Where a rank's memory is drawn.

    Attributes:
        y, height: in pixels.
        scale: of the time, in milliseconds.
        top: bytes of the height.
    """

    y: float
    height: float
    scale: Scale
    top: float

    def span(self, low: float, size: float) -> tuple[float, float]:
        """The upper edge and the height of bytes from `low` on."""
        return self.y + self.height * (1 - (low + size) / self.top), self.height * size / self.top


def _memory_row(
    drawing: Drawing, plan: Plan, rank: RankMemory, changes: Sequence[Held], *, unit: SizeUnit, area: _Area
) -> None:
    base = rank.expected - rank.activations - rank.working  # held all the time
    middle, end_of_pass = area.y + area.height / 2, area.scale.end

    def layer(start: float, end: float, low: float, size: float, fill: str, note: str) -> None:
        if size > 0 and end > start:
            upper, tall = area.span(low, size)
            x, width = area.scale.x(start), (end - start) * area.scale.pixels
            drawing.marks.append(Box(x=x, y=upper, width=width, height=tall, fill=fill, note=note))

    layer(0.0, end_of_pass, 0.0, base, _USED, f"state and buffers: {unit.text(base)}")
    in_flight = max((change.microbatches for change in changes), key=sum)
    shared = rank.activations + rank.working - _product(in_flight, rank.microbatch)  # beside any number of microbatches
    for held, end in zip(changes, [change.start for change in changes[1:]] + [end_of_pass], strict=True):
        if not any(held.microbatches):
            continue
        kept = shared + _product(held.microbatches, rank.microbatch)
        note = f"{counted(sum(held.microbatches), 'microbatch', 'microbatches')}: {unit.text(base + kept)}"
        layer(held.start, end, base, kept, _KEPT, note)
    if area.top >= plan.capacity:
        limit, _ = area.span(plan.capacity, 0.0)
        drawing.marks.append(Line(x1=_LEFT, y1=limit, x2=_LEFT + area.scale.width, y2=limit, color=_LIMIT))
    right = _LEFT + area.scale.width
    drawing.marks.append(Words(x=right + 8, y=middle, text=f"peak {unit.text(rank.expected)}", size=12))


def _product(counts: Sequence[int], sizes: Sequence[float]) -> float:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


# ---- search ----------------------------------------------------------------------------------------------------------


def frontier_picture(found: Found, top: int = 10) -> Drawing:
    """Time by memory of the layouts that fit: memory to the right, time upwards. The frontier is marked, and its
    fastest layouts are named. `top`: rows of the table beside it, whose unit it has."""
    fastest = min(layout.seconds for layout in found.layouts)
    shown = [layout for layout in found.layouts if layout.seconds <= _SLOWEST * fastest]
    marked = [layout for layout in found.frontier if layout.seconds <= _SLOWEST * fastest]
    unit = found.unit(top)

    def dot(layout: Layout, fill: str, name: str = "") -> Dot:
        note = f"{four_digits(layout.seconds)} s{'' if layout.is_simulated else ', estimated'}: {layout.flags}"
        return Dot(layout.memory_bytes / unit.bytes, layout.seconds, note, fill, name)

    dots = [dot(layout, _GREY if layout.is_simulated else _DOT) for layout in shown]
    ends = [dot(layout, _LIMIT, str(n) if n <= _NUMBERED else "") for n, layout in enumerate(marked, start=1)]
    steps = [(ends[-1].x, ends[-1].y)]  # the fastest layout needs most memory: it is the last one to the right
    for left, right in itertools.pairwise(reversed(ends)):
        steps += [(left.x, right.y), (right.x, right.y)]
    layouts = counted(len(found.layouts), "layout")
    verb = "fit" if len(found.layouts) > 1 else "fits"
    title = f"{layouts} that {verb} into {size_unit([found.capacity]).text(found.capacity)} of {found.cluster.name}"
    curve = Curve(title=f"seconds of a step: {title}", points=steps, dots=[*dots, *ends])  # marked ones above others
    drawing = curves(title, [curve], x_title=f"{unit.name} per rank")
    named = [
        f"{n}. {four_digits(layout.seconds)} s, {unit.text(layout.memory_bytes)}: {layout.flags}"
        for n, layout in enumerate(marked[:_NUMBERED], start=1)
    ]
    for text in (*_legend(found, drawn=len(shown), numbered=len(named)), *named):
        for line in wrapped(text, drawing.width - 2 * _TOP, size=11.5):
            drawing.height += 16
            drawing.marks.append(Words(x=_TOP, y=drawing.height - 10, text=line, size=11.5))
    return drawing


def _legend(found: Found, *, drawn: int, numbered: int) -> list[str]:
    """What the picture of a search shows, and what it leaves out.

    Args:
        found: by the search.
        drawn: how many of its layouts the picture has.
        numbered: how many of its frontier have a number.
    """
    first = "step time by memory per rank; red: the frontier"
    if len(found.frontier) > numbered:
        first += f" of {len(found.frontier)} layouts, the {numbered} fastest with a number"
    second = []
    if not all(layout.is_simulated for layout in found.layouts):
        second.append("dark dots are simulated, light ones estimated")
    if missing := len(found.layouts) - drawn:
        second.append(f"not drawn: {missing:,} that take{'s' * (missing == 1)} more than {_SLOWEST} times the fastest")
    return [first, "; ".join(second)] if second else [first]
