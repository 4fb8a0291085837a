"""What a search prints: its best layouts as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megacore.config.messages import counted
from megacore.config.spelling import flag_and_value
from megacore.models.outline import outline
from megacore.plan.checked import APART, checked_line, checked_steps, is_small
from megacore.plan.compare import compared, verdict
from megacore.plan.memory import held_on_host, uses_host
from megacore.plan.plan_json import (
    cluster_json,
    layout_flags,
    layout_json,
    node_host_json,
    run_json,
)
from megacore.plan.plan_report import four_digits, settings_line
from megacore.plan.planner import LOW_CONFIDENCE, Origin, Plan, make_plan, peak_figure
from megacore.plan.search import ALIKE, Found, Layout, memory_of
from megacore.plan.size_unit import size_unit
from megacore.plan.state import whole_parameters

_FRONTIER = (
    "Frontier: no other layout is better in both time and memory; of layouts that differ by less than "
    f"{ALIKE:.1%}, one is marked."
)


def search_table(
    found: Found, own: Plan | None = None, *, top: int, tokens: float | None = None, goodput: float = 0.9
) -> str:
    """The best layouts as a Markdown table: of each way to divide the model the fastest schedule. `own`: the layout of
    the user's configuration file, with which the best one is compared."""
    frontier = {id(layout) for layout in found.frontier}
    given = ", ".join(f"`{flag_and_value(name, value)}`" for name, value in found.fixed.items())
    skipped = ""
    if found.left_out:
        skipped = f"; skipped {found.left_out:,}: a smaller microbatch takes less time and memory"
    capacity = size_unit([found.capacity]).text(found.capacity)
    rows = found.divisions[:top]
    sizes = [layout.memory_bytes for layout, *_ in rows]
    memory = [memory_of(layout, found.cluster) for layout, *_ in rows]
    unit = found.unit(top)
    node_ranks = found.cluster.device.node_ranks
    on_host = [held_on_host(layout.config, ranks, node_ranks) for (layout, *_), ranks in zip(rows, memory, strict=True)]
    columns = {unit.name: unit.column(sizes)}
    if any(on_host):
        columns[f"{unit.name} in host memory per node"] = unit.column(on_host)
    names = ["#", "s/step", "range", "tokens/s", *columns, "flags", *(["days", "USD"] if tokens else [])]
    lines = [
        f"# {len(found.layouts):,} of {found.tried:,} valid layouts fit {capacity} per rank of "
        f"{found.cluster.name}, software {found.cluster.software.name} "
        f"(searched in {found.wall_seconds:.1f} s{skipped})",
        "",
        *_run(found),
        *(["", f"As given, and not searched for: {given}."] if given else []),
        "",
        f"| {' | '.join(names)} |",
        "|---" * len(names) + "|",
    ]
    has_small = False
    for number, ((layout, *others), *held) in enumerate(zip(rows, *columns.values(), strict=True), start=1):
        rate = _rate(layout)
        spread = "estimated" if layout.range is None else " to ".join(map(four_digits, layout.range))
        mark = " (frontier)" if id(layout) in frontier else ""
        mark += "; tight" if is_tight(layout, found) else ""
        if others:
            slowest = max(other.seconds for other in others)
            mark += f"; {len(others)} other schedule{'s' * (len(others) > 1)}, up to {four_digits(slowest)} s"
        if is_small(layout.config, found.cluster):
            mark, has_small = f"{mark}; low confidence", True
        cells = [str(number), four_digits(layout.seconds), spread, f"{rate:,.0f}", *held, f"`{layout.flags}`{mark}"]
        if tokens:
            ranks = layout.config.parallel.ranks
            days, price = found.cluster.cost(tokens, tokens_per_second=rate, goodput=goodput, ranks=ranks)
            cells += [four_digits(days), f"{price:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Low confidence: the time may be far off, because {LOW_CONFIDENCE}."] if has_small else []
    if frontier & {id(layout) for layout, *_ in rows}:
        lines += ["", _FRONTIER]
    if "; tight" in "".join(lines):
        lines += ["", f"Tight: the upper end of the range of the peak is above {capacity}."]
    lines.append("")
    if (equal := sum(is_equal(layout, found) for layout, *_ in rows)) > 1:
        lines.append(
            f"- 1 to {equal} are equal: the planner cannot tell times apart that differ by less than {APART:.0%}"
        )
    lines += [f"- {line}" for line in reasons(found, own)]
    estimated = [str(number) for number, (layout, *_) in enumerate(rows, start=1) if layout.memory is None]
    how = "traced" if len(estimated) < len(rows) else "estimated"
    if 0 < len(estimated) < len(rows):
        how += f" (estimated in row{'s' * (len(estimated) > 1)} {', '.join(estimated)})"
    lines.append(f"- times: {checked_line(rows[0][0].config, found.cluster)}; memory: {how}")
    return "\n".join([*lines, "", "For the details of a layout, plan it alone: add its flags, without --search."])


def is_equal(layout: Layout, found: Found) -> bool:
    """Whether the planner cannot tell the layout from the fastest one."""
    return layout.seconds < (1 + APART) * found.layouts[0].seconds


def is_tight(layout: Layout, found: Found) -> bool:
    """Whether the upper end of the range of its memory does not fit."""
    return peak_figure(*memory_of(layout, found.cluster)).high > found.capacity


def reasons(found: Found, own: Plan | None) -> list[str]:
    """Why the fastest layout is faster than the next one of another division, and than the user's own."""
    first, *others = (layouts[0] for layouts in found.divisions[:2])
    names = [(f"{number}", layout) for number, layout in enumerate((first, *others), start=1)]
    best, *plans = (compared(name, make_plan(layout.config, found.cluster)) for name, layout in names)
    if own is not None:
        plans.append(compared(f"your layout (`{layout_flags(own.config)}`)", own))
    return [verdict(best, other) for other in plans]


def _rate(layout: Layout) -> float:
    """Tokens per second."""
    return layout.config.training.global_batch_size * layout.config.data.seq_length / layout.seconds


def _run(found: Found) -> Iterator[str]:
    """What all layouts train, as the report of a plan names it."""
    config = found.run
    name = f"{config.model.preset}, " if config.model.preset else ""
    batch, length = config.training.global_batch_size, config.data.seq_length
    yield f"- model: {name}{whole_parameters(config, outline(config)):,} parameters (exact)"
    yield from settings_line(config)
    yield f"- batch: {counted(batch, 'sequence')} of {counted(length, 'token')}"


def search_json(
    found: Found, own: Plan | None = None, *, top: int, tokens: float | None = None, goodput: float = 0.9
) -> dict[str, Any]:
    """The best layouts, and the frontier, by the names of a plan's JSON; arguments as for `search_table`."""
    config, cluster = found.run, found.cluster
    offloading = next((layout.config for layout in found.layouts if uses_host(layout.config)), config)
    ranks = config.parallel.ranks
    origin: Origin = "fitted" if cluster.is_fitted else "assumed"

    def row(layout: Layout) -> dict[str, Any]:
        def timed(value: float, unit: str, *, is_rate: bool = False) -> dict[str, Any]:
            ends: list[Any] = [None, None]  # of a time that is not simulated
            if layout.range is not None:
                ratios = [seconds / layout.seconds for seconds in layout.range]
                ends = sorted(value / ratio if is_rate else value * ratio for ratio in ratios)
            return {"value": value, "unit": unit, "origin": origin, "low": ends[0], "high": ends[1]}

        rate, memory = _rate(layout), memory_of(layout, cluster)
        fields: dict[str, Any] = {
            "flags": layout.flags,
            "layout": layout_json(layout.config),
            "fits": True,
            "peak": asdict(peak_figure(*memory)),
            **node_host_json(layout.config, memory, cluster),
            "step_seconds": timed(layout.seconds, "s"),
            "throughput": {"tokens/s": timed(rate, "tokens/s", is_rate=True)},
            "simulated": layout.is_simulated,
            "low_confidence": is_small(layout.config, cluster),
            "checked_steps": checked_steps(layout.config, cluster),
            "equal_to_first": is_equal(layout, found),
            "tight": is_tight(layout, found),
        }
        if tokens is not None:
            days, price = cluster.cost(tokens, tokens_per_second=rate, goodput=goodput, ranks=ranks)
            of_training = {"days": timed(days, "days"), "price": timed(price, "USD")}
            fields["training"] = {"tokens": tokens, "goodput": goodput, **of_training}
        return fields

    return {
        **run_json(config, outline(config)),
        **cluster_json(offloading, cluster, capacity=found.capacity),
        "fixed": dict(found.fixed),
        "valid": found.tried,
        "left_out": found.left_out,
        "fit": len(found.layouts),
        "wall_seconds": found.wall_seconds,
        "layouts": [row(layout) for layout in found.layouts[:top]],
        "frontier": [row(layout) for layout in found.frontier],
        "verdicts": reasons(found, own),
    }
