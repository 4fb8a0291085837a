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
from megacore.plan.plan_json import described
from megacore.plan.planner import Figure, Origin
from megacore.plan.size_unit import size_unit

# Of the numbers of a cluster file: their units, and what of a fit changes them.
CLUSTER_FIELDS = {
    "memory_gb": ("GB", "machine"),
    "memory_bandwidth_gb_s": ("GB/s", "fitted"),
    "gpus_per_node": ("devices", "machine"),
    "node_bandwidth_gb_s": ("GB/s", "links"),
    "node_latency_us": ("us", "links"),
    "nics_per_node": ("network cards", "base"),
    "nic_bandwidth_gb_s": ("GB/s", "links"),
    "network_latency_us": ("us", "links"),
    "host_link_gb_s": ("GB/s", "base"),
    "host_memory_gb_s": ("GB/s", "base"),
    "host_memory_gb": ("GB", "base"),
    "price_per_hour": ("USD per device and hour", "base"),
    "peak_tflops": ("TFLOP/s", "fitted"),
    "products": ("share", "fitted"),
    "attention": ("share", "fitted"),
    "memory": ("share", "fitted"),
    "links": ("share", "links"),
    "network": ("share", "links"),
    "launch_us": ("us", "fitted"),
    "host_us": ("us", "fitted"),
}


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
    off = round(after.expected / steps.median - 1, 6) + 0.0  # no -0.0
    gap = "" if fit.is_traced else f" ({off:+.1%})"  # below it is what is unexplained
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
    report = {
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
    return described(report, "fitted", dict(_numbers(fit)))


def _numbers(fit: Calibration) -> Iterator[tuple[str, tuple[str, Origin]]]:
    """Unit and origin of the bare numbers, by key. Fields of the base that the fit does not change have its origin."""
    before: Origin = "fitted" if fit.base.is_fitted else "assumed"
    links: Origin = before if fit.links is None else "fitted"
    machine: Origin = before if fit.machine is None else "exact"
    yield "rows", ("rows", "exact")
    yield "rows_left_out", ("rows", "exact")
    yield "measured_seconds", ("s", "exact")
    yield "base_seconds", ("s", before)
    yield "unexplained_seconds", ("s", "fitted")
    yield "factor", ("times the base", "fitted")
    yield "measured_factor", ("times the base", "fitted")
    yield "transfers", ("transfers", "exact")
    yield "cores", ("cores", "exact")
    yield "memory_bytes", ("bytes", "exact")
    origins: dict[str, Origin] = {"fitted": "fitted", "links": links, "machine": machine, "base": before}
    for name, (unit, changed_by) in CLUSTER_FIELDS.items():
        yield name, (unit, origins[changed_by])
