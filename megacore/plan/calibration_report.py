"""What --calibrate prints: the figures of a fit in words, or as JSON."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore.config.messages import counted
from megacore.plan.calibration import Calibration
from megacore.plan.cluster import to_toml
from megacore.plan.planner import Figure
from megacore.plan.size_unit import size_unit


def calibration_text(fit: Calibration) -> str:
    """The figures of a fit in words, a line for each."""
    return "\n".join(_lines(fit))


def _lines(fit: Calibration) -> Iterator[str]:
    steps, base, links = fit.run.steps, fit.base.name, fit.links
    yield (
        f"measured step: {steps.median:.4g} s, the median of {counted(steps.rows, 'logged row')} without the first "
        f"{steps.left_out}; most steps take {steps.fast:.4g} to {steps.slow:.4g} s"
    )
    yield from _machine(fit)
    before = fit.base_seconds
    yield f"predicted for {base}: {before:.4g} s ({before / steps.median - 1:+.0%})"
    if links is not None:
        text = f"speed of the links: x {links.fitted:.3g}, from {counted(links.transfers, 'transfer')} in trace.json"
        if links.fitted != links.measured:
            text += f" (measured x {links.measured:.3g}, which is not realistic: something delayed the ranks)"
        yield text
    source = "the step times (--trace gives more, and with --pp 2 or --tp 2 also the speed of the links)"
    if fit.is_traced:
        source = "the computations in trace.json"
    yield f"speed of a device: x {fit.device_speed:.3g}, from {source}"
    if links is None:
        yield f"speed of the links: that of {base}; this run does not measure it"
    elif fit.run.transfers is not None and not fit.run.transfers.sums:
        yield "not measured: all-reduces over --tp ranks; assumed as fast as pipeline messages"
    after = fit.seconds
    gap = "" if fit.is_traced else f" ({after.expected / steps.median - 1:+.1%})"  # below it is what is unexplained
    yield f"predicted with it: {after.expected:.4g} s{gap}, range {after.fast:.4g} to {after.slow:.4g} s"
    if fit.is_traced:
        yield (
            f"unexplained: {fit.unexplained:+.3g} s ({fit.unexplained / after.expected:+.1%} of the prediction): "
            "waits, uneven stages, host overhead, other programs; it widens the range"
        )
    if fit.doubts:
        yield f"low confidence: {'; '.join(fit.doubts)}. Predictions of other layouts may be far off"


def _machine(fit: Calibration) -> Iterator[str]:
    """Where the capacities are from."""
    if (machine := fit.machine) is not None:
        memory = size_unit([machine.memory_bytes]).text(machine.memory_bytes)
        yield f"machine: {counted(machine.cores, 'core')}, {memory} of memory, {machine.source}"
    elif fit.base.on_cpu and fit.run.launch.machine is None and fit.run.launch.was_elsewhere:
        host = fit.run.launch.host
        yield f"machine: memory and cores are those of {fit.base.name}, as the run on {host} recorded none"


def calibration_json(fit: Calibration, path: Path) -> dict[str, Any]:
    """The figures of a fit, and the fields of the cluster file that it is written to."""
    steps, seconds = fit.run.steps, fit.seconds
    figure = Figure(value=seconds.expected, unit="s", origin="fitted", low=seconds.fast, high=seconds.slow)
    links = fit.links
    return {
        "path": str(path),
        "cluster": tomllib.loads(to_toml(fit.cluster)),
        "base": fit.base.name,
        "machine": None if fit.machine is None else asdict(fit.machine),
        "rows": steps.rows,
        "rows_left_out": steps.left_out,
        "measured_seconds": {"fast": steps.fast, "median": steps.median, "slow": steps.slow},
        "base_seconds": fit.base_seconds,
        "step_seconds": asdict(figure),
        "device_speed": {"factor": fit.device_speed, "from": "trace.json" if fit.is_traced else "metrics.jsonl"},
        "link_speed": None
        if links is None
        else {"factor": links.fitted, "measured_factor": links.measured, "transfers": links.transfers},
        "unexplained_seconds": fit.unexplained,
        "low_confidence": bool(fit.doubts),
        "doubts": list(fit.doubts),
    }
