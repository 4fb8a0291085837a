"""The panels of a traced run: a step as its schedule would be without delays, and as it was measured."""

from __future__ import annotations

from pathlib import Path

from megacore.config.messages import counted
from megacore.drawing.timelines import Panel
from megacore.drawing.trace_file import read_trace
from megacore.pipeline.schedule import Schedule
from megacore.pipeline.simulator import Timeline, simulate

TITLES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved 1F1B", "zero-bubble": "Zero bubble (ZB-H1)"}
TITLES |= {"zb-v": "Zero bubble in a V (ZB-V)", "dualpipev": "DualPipeV"}


def traced_panels(path: Path, step: int | None = None) -> list[Panel]:
    """A step simulated with the run's own mean times, and below it what was measured; in milliseconds. `step`: which
    one; None: the last. Raises UserError as for `read_trace`."""
    measured = read_trace(path, step)
    schedule = measured.schedule

    def panel(kind: str, how: str, timeline: Timeline, note: str = "") -> Panel:
        title = TITLES.get(schedule.name, schedule.name)
        return Panel(
            title=f"{kind} {how}: {title}, {describe_counts(schedule)}, {timeline.end:.4g} ms",
            bubble=f"{kind} bubble {timeline.idle_share:.1%} of the ranks' time{note}",
            timeline=timeline,
            virtual_stages=schedule.virtual_stages,
        )

    simulated = panel("simulated", "with each stage's mean times", simulate(schedule, measured.costs))
    apart = f"; the ranks' clocks differ by at least {measured.early:.3g} ms" if measured.early else ""
    return [simulated, panel("measured", f"in step {measured.step}", measured.timeline, apart)]


def describe_counts(schedule: Schedule) -> str:
    """Ranks, stages per rank and microbatches in words."""
    virtual = f" of {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    ranks, microbatches = counted(schedule.ranks, "rank"), counted(schedule.microbatches, "microbatch", "microbatches")
    return f"{ranks}{virtual}, {microbatches}"
