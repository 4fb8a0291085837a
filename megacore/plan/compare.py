"""Layouts of one run against each other: which one is faster, what makes it so, and whether the planner can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megacore.config.messages import counted
from megacore.plan.checked import APART, checked_line
from megacore.plan.plan_report import PARTS, as_json, four_digits, layout_lines, throughput
from megacore.plan.planner import Plan, peak_figure
from megacore.plan.size_unit import memory_unit, size_unit
from megacore.plan.software import MEGACORE
from megacore.plan.step_time import StepTime

_TOLD = 0.2  # of the largest difference of a part; smaller ones are left out of the reason
_NAMES = {
    part: f"exposed {text.removesuffix(', exposed')}" if text.endswith(", exposed") else text.removeprefix("compute: ")
    for part, text in PARTS.items()
}


class Compared(NamedTuple):
    """A layout in a comparison: its name, a step as expected, and its seconds at the least and most."""

    name: str
    time: StepTime
    low: float
    high: float
    fits: bool = True


def verdict(one: Compared, other: Compared) -> str:
    """Which of two steps of one batch is faster, whether the planner can tell, and why: the parts that differ most, in
    percent of the slower step."""
    fast, slow = sorted((one, other), key=lambda step: step.time.seconds)
    saved = {
        name: (getattr(slow.time, part) - getattr(fast.time, part)) / slow.time.seconds for part, name in _NAMES.items()
    }
    least = max(_TOLD * max(map(abs, saved.values())), 5e-4)
    told = sorted(((gain, name) for name, gain in saved.items() if abs(gain) >= least), reverse=True)
    parts = ", ".join(f"{abs(gain):.1%} {'less' if gain > 0 else 'more'} {name}" for gain, name in told)
    reason = (
        f"{1 - fast.time.seconds / slow.time.seconds:.1%} of the time of {slow.name} ({parts or 'no part differs'})"
    )
    if not fast.fits:
        return f"{fast.name} would save {reason}, but {'does not fit' if slow.fits else 'neither fits'}"
    if slow.time.seconds < (1 + APART) * fast.time.seconds:
        text = f"{fast.name} and {slow.name} are equal within the error of {APART:.0%}"
        text += f": {fast.name} saves {reason}" if told else ": no part differs"
    else:
        overlap = "overlap" if fast.high >= slow.low else "do not overlap"
        text = f"{fast.name} wins: it saves {reason}; the ranges {overlap}"
    return text if slow.fits else f"{text}; {slow.name} does not fit"


def compared(name: str, plan: Plan) -> Compared:
    """A plan under a name."""
    whole = plan.timed(plan.time.seconds, "s")
    return Compared(name, plan.time, low=whole.low, high=whole.high, fits=plan.fits)


def order_of(plans: Sequence[Plan]) -> list[int]:
    """The numbers of the plans, those that fit first, of these the fastest first."""
    return sorted(range(len(plans)), key=lambda number: (not plans[number].fits, plans[number].time.seconds))


def verdicts(plans: Sequence[Plan], names: Sequence[str]) -> list[str]:
    """A line on the best plan against each other one."""
    best, *others = (compared(names[number], plans[number]) for number in order_of(plans))
    return [verdict(best, other) for other in others]


def fit_text(plan: Plan) -> str:
    """Whether the plan fits: `tight` where the upper end of the range of its peak does not."""
    if not plan.fits:
        return "does not fit"
    return "tight" if peak_figure(*plan.memory).high > plan.capacity else "fits"


def comparison_table(
    plans: Sequence[Plan], given: Sequence[str], *, tokens: float | None = None, goodput: float = 0.9
) -> str:
    """Plans of one run side by side, as Markdown.

    Args:
        plans: to compare.
        given: the flags that make each of them.
        tokens: of the whole training; None: days and price are left out.
        goodput: share of the time that makes progress.
    """
    names = [letter(number) for number in range(len(plans))]
    config, training = plans[0].config, plans[0].config.training
    unit = memory_unit([rank for plan in plans for rank in plan.memory])
    whole = [plan.timed(plan.time.seconds, "s") for plan in plans]
    rates = [throughput(plan) for plan in plans]
    mfu = "MFU, causal attention" if config.is_causal else "MFU, full attention"
    rows = {
        "s/step": [four_digits(figure.value) for figure in whole],
        "range": [f"{four_digits(figure.low)} to {four_digits(figure.high)}" for figure in whole],
        "tokens/s": [f"{plan.tokens_per_second:,.0f}" for plan in plans],
        mfu: [f"{rate[mfu].value:.1%}" for rate in rates],
        f"peak memory, {unit.name}": unit.column([plan.fullest.expected for plan in plans]),
        "memory": [f"{fit_text(plan)} ({size_unit([plan.capacity]).text(plan.capacity)})" for plan in plans],
    }
    if any(plan.on_host for plan in plans):
        rows[f"host memory per node, {unit.name}"] = unit.column([plan.on_host for plan in plans])
    if tokens is not None:
        costs = [plan.cost(tokens, goodput=goodput) for plan in plans]
        rows[f"days of {tokens:,.0f} tokens"] = [four_digits(days) for days, _ in costs]
        rows["USD"] = [f"{price:,.0f}" for _, price in costs]
    for part, text in PARTS.items():
        if any(plan.part(part).high for plan in plans):
            rows[f"{text}, s"] = [four_digits(plan.part(part).value) for plan in plans]
    lines = [
        f"# Compare: {config.model.preset or 'model'} on {config.parallel.ranks} ranks, "
        f"{counted(training.global_batch_size, 'sequence')} of {counted(config.data.seq_length, 'token')}",
        "",
    ]
    for name, flags, plan in zip(names, given, plans, strict=True):
        layout = next(layout_lines(plan.config)).removeprefix("- layout: ")
        software = "" if plan.cluster.software == MEGACORE else f" with {plan.cluster.software.name}"
        lines.append(f"- {name}: {f'`{flags}`' if flags else 'as given'}: {layout}, on {plan.cluster.name}{software}")
    checked = [(checked_line(plan.config, plan.cluster), name) for plan, name in zip(plans, names, strict=True)]
    lines += [f"- {line}" for line in told_together(checked, names)]
    lines += ["", f"| | {' | '.join(names)} |", "|---" * (len(plans) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([*lines, "", *(f"- {line}" for line in verdicts(plans, names))])


def letter(number: int) -> str:
    """The name of a layout, by its place on the command line from 0."""
    return chr(ord("A") + number)


def told_together(said: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Each line once, with the names of those that it is said of where it is not said of all.

    Args:
        said: lines, each with the name that it is said of.
        names: of all.
    """
    of_line: dict[str, list[str]] = {}
    for line, name in dict.fromkeys(said):
        of_line.setdefault(line, []).append(name)
    return [line if len(who) == len(names) else f"{', '.join(who)}: {line}" for line, who in of_line.items()]


def comparison_json(
    plans: Sequence[Plan], given: Sequence[str], *, tokens: float | None = None, goodput: float = 0.9
) -> dict[str, Any]:
    """Each plan as `as_json` has it with the flags it was `given`, the best first, and the verdicts; arguments as for
    `comparison_table`."""
    names = [f"({flags or 'as given'})" for flags in given]
    layouts = [{"given": given[n], **as_json(plans[n], tokens=tokens, goodput=goodput)} for n in order_of(plans)]
    return {"layouts": layouts, "verdicts": verdicts(plans, names)}
