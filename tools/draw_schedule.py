"""Draw a pipeline schedule, or a traced run beside what was predicted of it.

    python tools/draw_schedule.py --schedule 1f1b --pp 4 --microbatches 8               # in the terminal
    python tools/draw_schedule.py --schedule zero-bubble --pp 4 --microbatches 8 -o out.svg
    python tools/draw_schedule.py --csv mine.csv -o out.png
    python tools/draw_schedule.py output/mock -o out.svg

docs/explain/schedules.md explains the pictures. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from rich.console import Console

from megacore.commands.tool import ToolParser, float_or_nan, run_tool
from megacore.config.parallel import V_SCHEDULES
from megacore.drawing.canvas import require_writable, save
from megacore.drawing.terminal import LEAST_WIDTH, render
from megacore.drawing.timelines import Panel, diagram
from megacore.drawing.traced import TITLES, describe_counts, traced_panels
from megacore.errors import UserError
from megacore.pipeline.schedule import SCHEDULES, build_schedule
from megacore.pipeline.schedule_file import load_schedule
from megacore.pipeline.simulator import Costs, simulate
from megacore.plan.closed_forms import closed_form

SHORTEST, LONGEST = 1e-6, 1e6  # times whose sums and quotients no picture loses to rounding
# Each flag that belongs to some of the three sources only.
BELONGS = {
    "pp": ("schedule",), "microbatches": ("schedule",), "virtual_stages": ("schedule",), "costs": ("schedule", "csv"),
    "transfer": ("schedule", "csv"), "step": ("from_trace",),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    parser = ToolParser.of("draw_schedule", SCHEDULES=SCHEDULES, costs=_costs, transfer=_transfer)
    return run_tool(parser, argv, _draw)


def _draw(args: argparse.Namespace) -> None:
    if args.run is not None:
        args.from_trace = args.run / "trace.json"
        if not args.from_trace.is_file():
            raise UserError(f"{args.run} has no trace.json: give the output directory of a run with --trace")
    _require_fitting_flags(args)
    if args.output is not None:
        require_writable(args.output)
    traced = args.from_trace is not None
    panels, unit = (traced_panels(args.from_trace, args.step), "ms") if traced else ([_planned(args)], "time")
    if args.output is not None:
        save(diagram(panels, unit=unit), args.output)
        print(f"{args.output}: " + "\n  ".join(f"{panel.title}: {panel.bubble}" for panel in panels))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(render(panels, console.width if console.is_terminal else LEAST_WIDTH, unit=unit))


def _require_fitting_flags(args: argparse.Namespace) -> None:
    (source,) = (name for name in ("schedule", "csv", "from_trace") if getattr(args, name) is not None)
    for name, sources in BELONGS.items():
        if getattr(args, name) is not None and source not in sources:
            belongs = " and ".join(map(_flag, sources))
            raise UserError(f"{_flag(name)} goes with {belongs}, not with {_flag(source)}: leave it out")
    missing = [_flag(name) for name in ("pp", "microbatches") if getattr(args, name) is None]
    if source == "schedule" and missing:
        raise UserError(f"--schedule {args.schedule} needs {' and '.join(missing)}: as in --pp 4 --microbatches 8")
    virtual = args.virtual_stages or 1
    if args.schedule in V_SCHEDULES:
        if args.virtual_stages not in (None, 2):
            raise UserError(f"--schedule {args.schedule} has 2 stages on each rank: use --virtual-stages 2")
        args.virtual_stages = 2
        return
    if args.schedule == "interleaved" and virtual == 1:
        raise UserError("--schedule interleaved needs several stages per rank: give --virtual-stages 2 or more")
    if source == "schedule" and args.schedule != "interleaved" and virtual > 1:
        idle = f"--virtual-stages {virtual} has no effect with --schedule {args.schedule}"
        raise UserError(f"{idle}: leave it out, or use --schedule interleaved")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _planned(args: argparse.Namespace) -> Panel:
    """A schedule that nobody has run, from a name or a file."""
    if args.csv is not None:
        schedule, title = load_schedule(args.csv), args.csv.name
    else:
        schedule = build_schedule(args.schedule, args.pp, args.microbatches, args.virtual_stages or 1)
        title = TITLES[args.schedule]
    # A rank's times of a microbatch, divided evenly over its stages.
    times = ([time / schedule.virtual_stages] * schedule.stages for time in args.costs or (1.0, 1.0, 1.0))
    forward, input_grad, weight_grad = times
    transfer = args.transfer or 0.0
    costs = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, transfer=transfer)
    timeline = simulate(schedule, costs)
    bubble = f"bubble {timeline.idle_share:.1%} of the ranks' time"
    form = closed_form(schedule, costs) if args.schedule is not None else None
    if form is not None:
        exact = math.isclose(timeline.idle_share, form.value, abs_tol=1e-9)
        bubble += f" = {form.formula}" if exact else f" ({form.formula} without transfers: {form.value:.1%})"
    title = f"{title}: {describe_counts(schedule)}"
    return Panel(title=title, bubble=bubble, timeline=timeline, virtual_stages=schedule.virtual_stages)


def _costs(text: str) -> list[float]:
    values = [float_or_nan(part) for part in text.split(",")]
    if len(values) != 3 or not all(SHORTEST <= value <= LONGEST for value in values):
        times = f"three times from {SHORTEST:g} to {LONGEST:,.0f}, in any unit, as in 1,1,1"
        raise argparse.ArgumentTypeError(f"{text} must be {times}")
    return values


def _transfer(text: str) -> float:
    value = float_or_nan(text)
    if not 0 <= value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text} must be a time from 0 to {LONGEST:,.0f}, in the unit of --costs")
    return value


if __name__ == "__main__":
    sys.exit(main())
