"""What every rank did when, as a file that Chrome's and Perfetto's trace viewers open, and read back from it.

A process of the file is a rank, named with its coordinates. Its first row shows each pass over the schedule as a whole,
its second what the rank did in it: computations, transfers (posting them, and waiting for what is to arrive or to
leave), and idle gaps, in which the program itself was at work; its third the collectives, as the program saw them, also
where an accelerator was behind (one that overlaps with other work twice: posting it, and waiting for it). Copies from
and to host memory follow, a row for each kind, as the device executed them. The update of the weights follows the pass
on the first row: the last reductions of gradients, their norm, and the optimizer. Arrows lead from a computation to
those of other ranks that need its result. Times are microseconds from the start of the trace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from megacore.config.dimensions import pipeline_dimension
from megacore.errors import UserError
from megacore.files import replace_bytes
from megacore.pipeline.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    Timed,
    requirements,
    result,
    with_transfers,
)
from megacore.pipeline.simulator import Costs, Span, Timeline
from megacore.pipeline.validation import prove

_PASSES, _ACTIONS, _COLLECTIVES, _COPIES = range(4)  # rows of a rank; one for each kind of copies from there on
_SHORTEST_IDLE = 1.0  # microseconds


class TracedTransfer(NamedTuple):
    """A collective, posted or waited for, or a copy from or to host memory; times are seconds on the wall clock."""

    name: str  # `all-reduce over dp`, `gradients to host`
    nbytes: int  # its size on this rank
    start: float
    end: float
    number: int = 0  # of a collective, on this rank: the same where it is posted and where it is waited for


@dataclass(frozen=True)
class TracedStep:
    """A rank's pass over the schedule, its collectives and copies, and when the weights were updated, if known."""

    step: int
    start: float
    end: float
    done: tuple[Timed, ...]
    updated: float | None = None
    collectives: tuple[TracedTransfer, ...] = ()
    copies: tuple[TracedTransfer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What a rank did."""

    coordinates: dict[str, int]  # along each dimension of the mesh, by name
    steps: tuple[TracedStep, ...]


def write_trace(path: Path, ranks: Sequence[RankTrace], schedule: Schedule) -> None:
    """Write the trace of all ranks of a run, whole or not at all."""
    steps = [step for rank in ranks for step in rank.steps]
    origin = min(t for step in steps for t in (step.start, *(one.start for one in step.collectives + step.copies)))
    events = [event for pid, rank in enumerate(ranks) for event in _events(pid, rank, origin)]
    events += _arrows(ranks, schedule.stages, origin)
    about = {
        "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages,
        **({"placement": "v"} if schedule.is_v else {}),
        "microbatches": schedule.microbatches,
    }
    content = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    replace_bytes(path, json.dumps(content, separators=(",", ":")).encode(), durable=False)


def _events(pid: int, rank: RankTrace, origin: float) -> Iterator[dict[str, Any]]:
    name = f"rank {pid}: " + ", ".join(f"{dimension} {number}" for dimension, number in rank.coordinates.items())
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name, **rank.coordinates}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    copies = sorted({one.name for step in rank.steps for one in step.copies})
    for tid, row in enumerate(("passes", "actions", "collectives", *copies)):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}

    def box(tid: int, name: str, category: str, start: float, end: float, **about: int) -> dict[str, Any]:
        at, until = _microseconds(start, origin), _microseconds(end, origin)
        duration = round(until - at, 1)
        event = {"ph": "X", "name": name, "cat": category, "ts": at, "dur": duration, "args": about}
        return {**event, "pid": pid, "tid": tid}

    for step in rank.steps:
        of_step = partial(box, step=step.step)
        yield of_step(_PASSES, f"step {step.step}", "pass", step.start, step.end)
        if step.updated is not None:
            yield of_step(_PASSES, "update", "update", step.end, step.updated)
        at = step.start
        for timed in step.done:
            if _microseconds(timed.start, origin) - _microseconds(at, origin) >= _SHORTEST_IDLE:
                yield of_step(_ACTIONS, "idle", "idle", at, timed.start)
            yield of_step(_ACTIONS, _name(timed), timed.kind, timed.start, timed.end, **_coordinates(timed))
            at = timed.end
        if _microseconds(step.end, origin) - _microseconds(at, origin) >= _SHORTEST_IDLE:
            yield of_step(_ACTIONS, "idle", "idle", at, step.end)
        for one in step.collectives:
            more = {"bytes": one.nbytes, "number": one.number}
            yield of_step(_COLLECTIVES, one.name, "collective", one.start, one.end, **more)
        for one in step.copies:
            tid = _COPIES + copies.index(one.name)
            yield of_step(tid, one.name, "copy", one.start, one.end, bytes=one.nbytes)


def _arrows(ranks: Sequence[RankTrace], stages: int, origin: float) -> Iterator[dict[str, Any]]:
    """Flow events from each computation to those of other ranks of its pipeline that need its result."""
    pipeline, number = pipeline_dimension(), 0
    ends: dict[Any, tuple[int, Timed]] = {}
    begins: list[tuple[int, Timed, list[Any]]] = []
    for pid, rank in enumerate(ranks):
        replica = tuple(coordinate for name, coordinate in rank.coordinates.items() if name != pipeline)
        for step in rank.steps:
            for timed in step.done:
                if timed.kind == "compute":
                    (action,) = timed.actions
                    ends[replica, step.step, result(action)] = pid, timed
                    needed = [(replica, step.step, key) for key in requirements(action, stages)]
                    begins.append((pid, timed, needed))
    for pid, timed, needed in begins:
        for sender, cause in (ends[key] for key in needed if key in ends and ends[key][0] != pid):
            number += 1
            about = {"name": f"{_name(cause)} to {_name(timed)}", "cat": "flow", "id": number, "tid": _ACTIONS}
            # A viewer binds an arrow to the box that contains its time.
            yield {**about, "ph": "s", "pid": sender, "ts": _microseconds((cause.start + cause.end) / 2, origin)}
            yield {
                **about,
                "ph": "f",
                "bp": "e",
                "pid": pid,
                "ts": _microseconds((timed.start + timed.end) / 2, origin),
            }


def _coordinates(timed: Timed) -> dict[str, int]:
    """Stage and microbatch, where there is only one."""
    actions = timed.actions
    return {"stage": actions[0].stage, "microbatch": actions[0].microbatch} if len(actions) == 1 else {}


def _name(timed: Timed) -> str:
    names = ", ".join(map(str, timed.actions))
    if timed.kind == "compute":
        return names
    return f"post {names}" if timed.kind == "post" else f"wait: {names or 'for the last sends'}"


def _microseconds(moment: float, origin: float) -> float:
    return round((moment - origin) * 1e6, 1)


# ---- reading ---------------------------------------------------------------------------------------------------------

_LATEST = 1e15  # microseconds: decades, and far from where sums lose the tenth of one
_SHORTEST = 0.05  # of what is rounded to a tenth of a microsecond
_ROUNDING = 0.001  # milliseconds


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """One step of one pipeline as it ran, in milliseconds from its first computation."""

    step: int  # number of the step
    schedule: Schedule  # what was executed; proven
    timeline: Timeline
    costs: Costs  # mean time of each stage's computations
    # By how much a computation begins before what it needs from another rank ends, at most: on machines whose clocks
    # differ.
    early: float


def read_trace(path: Path, step: int | None = None) -> MeasuredPass:
    """The pipeline whose ranks are first along every other dimension of the mesh, in one step of a trace. `path`: of a
    file that `write_trace` wrote. `step`: which one; None: the last. Raises UserError where the file is not such a one,
    does not have the step, or the step's actions are no schedule."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content["otherData"]
        name, virtual, microbatches = about["schedule"], _count(about["virtual_stages"]), _count(about["microbatches"])
        if not isinstance(name, str):
            raise TypeError(name)
        processes = [(e["pid"], e["args"]) for e in content["traceEvents"] if e["name"] == "process_name"]
        pipeline = pipeline_dimension()
        rank_of = {
            pid: _count(arguments[pipeline] + 1) - 1
            for pid, arguments in processes
            if all(number == 0 for name, number in arguments.items() if name not in ("name", pipeline))
        }
        computed = [e for e in content["traceEvents"] if e.get("cat") == "compute" and e["pid"] in rank_of]
        spans_of = [(_count(e["args"]["step"]), rank_of[e["pid"]], _span(e)) for e in computed]
        steps = sorted({step for step, _, _ in spans_of})
        chosen = steps[-1] if step is None else step
    except OSError as error:
        raise UserError(f"--from-trace {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise UserError(f"--from-trace {path} is not a trace.json that a run with --trace wrote") from None
    if chosen not in steps:
        raise UserError(f"--step {chosen}: {path} has the steps {', '.join(map(str, steps))}")
    try:
        spans = _rows([(rank, span) for number, rank, span in spans_of if number == chosen], list(rank_of.values()))
        order = [[span.action for span in row] for row in spans]
        is_v = about.get("placement") == "v"
        schedule = with_transfers(name, order, virtual_stages=virtual, microbatches=microbatches, is_v=is_v)
        prove(schedule)
    except ScheduleError as error:
        raise UserError(f"--from-trace {path} is not whole: {error}") from None
    timeline = Timeline(spans=spans)
    return MeasuredPass(
        step=chosen,
        schedule=schedule,
        timeline=timeline,
        costs=_mean_costs(spans),
        early=_early(spans, schedule.stages),
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(value)
    return value


def _time(value: object, least: float) -> float:
    if type(value) not in (int, float) or not least <= value <= _LATEST:  # type: ignore[operator]
        raise ValueError(value)
    return float(value)  # type: ignore[arg-type]


def _span(event: dict[str, Any]) -> Span:
    stage, microbatch = event["args"]["stage"], event["args"]["microbatch"]
    (op,) = (op for op in Op if not op.is_transfer and event["name"] == str(Action(op, microbatch, stage)))
    start = _time(event["ts"], 0.0)
    end = start + _time(event["dur"], _SHORTEST)
    return Span(Action(op, _count(microbatch + 1) - 1, _count(stage + 1) - 1), start / 1000, end / 1000)


def _rows(spans: Sequence[tuple[int, Span]], ranks: Sequence[int]) -> list[list[Span]]:
    """What each rank did, in order. Raises ScheduleError where ranks are missing, twice there, or do two things at
    once."""
    if sorted(ranks) != list(range(len(ranks))):
        raise ScheduleError(f"its processes are the pipeline ranks {', '.join(map(str, ranks))}")
    first = min(span.start for _, span in spans)
    rows: list[list[Span]] = [[] for _ in ranks]
    for rank, span in sorted(spans, key=lambda pair: pair[1].start):
        if rows[rank] and span.start - first < rows[rank][-1].end - _ROUNDING:
            raise ScheduleError(f"rank {rank}: {span.action} begins before {rows[rank][-1].action} ends")
        rows[rank].append(Span(span.action, span.start - first, span.end - first))
    return rows


def _early(spans: Sequence[Sequence[Span]], stages: int) -> float:
    ends = {result(span.action): span.end for row in spans for span in row}
    needed = ((ends[key], span.start) for row in spans for span in row for key in requirements(span.action, stages))
    early = max((end - start for end, start in needed), default=0.0)
    return early if early > _ROUNDING else 0.0


def mean_durations(spans: Iterable[Span], kind: Callable[[Action], Any]) -> dict[Any, float]:
    """The mean duration of the computations of each kind."""
    durations_of: dict[Any, list[float]] = defaultdict(list)
    for span in spans:
        durations_of[kind(span.action)].append(span.end - span.start)
    return {key: sum(durations) / len(durations) for key, durations in durations_of.items()}


def _mean_costs(spans: Sequence[Sequence[Span]]) -> Costs:
    """Mean times of each stage; a backward that was done whole counts as an input gradient."""
    mean = mean_durations(chain.from_iterable(spans), attrgetter("op", "stage"))
    stages = range(1 + max(stage for _, stage in mean))
    whole = [mean.get((Op.BACKWARD, s), 0.0) for s in stages]
    return Costs(
        forward=[mean.get((Op.FORWARD, s), 0.0) for s in stages],
        input_grad=[mean.get((Op.INPUT_GRAD, s), whole[s]) for s in stages],
        weight_grad=[mean.get((Op.WEIGHT_GRAD, s), 0.0) for s in stages],
    )
