"""Fits a cluster to one run of megacore: a single measured step, of which one constant follows.

That constant is the speed of a device, of products, memory and launches alike. It makes the predicted step as long as
the median of all logged ones without the first; the spread of these is the range of the fitted cluster. The links stay
those of the cluster that is scaled: rows of several layouts tell them apart (row_fit.py).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config.messages import counted, one_of
from megacore.errors import ConfigError
from megacore.models.outline import outline
from megacore.plan.cluster import CLUSTERS, Cluster, cluster_named, to_toml
from megacore.plan.devices import Device, Range
from megacore.plan.measured_run import Launch, Machine, MeasuredRun, Steps
from megacore.plan.planner import CASES, Figure, scheduled
from megacore.plan.row_fit import Vector, solve
from megacore.plan.size_unit import size_unit
from megacore.plan.step_time import step_time

_SPREAD = 0.1  # of a fitted speed, to both sides, at least
_WIDEST = 0.05  # share of a speed that its slow case has at least
_MOST = 1e4  # factor by which a device is faster or slower than the base's
# One row is taken at its word: the prior of the speed's logarithm is wide, and the noise of the row narrow.
_ANY_SPEED, _EXACT = 10.0, 1e-6
_UNSTEADY = 1.3  # slow steps by fast steps, beyond which a fit is poor


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted cluster, and the figures of the fit.

    Attributes:
        run: to which it is fitted.
        base: the cluster whose speeds were scaled, with the run's machine.
        cluster: the fitted one.
        machine: from which its memory and its devices per node are; None: they are the base's.
        base_seconds: of a step, predicted for the base.
        device_speed: factor by which a device is faster than the base's.
        seconds: of a step, predicted for the fitted cluster.
        doubts: why predictions may be far off.
    """

    run: MeasuredRun
    base: Cluster
    cluster: Cluster
    machine: Machine | None
    base_seconds: float
    device_speed: float
    seconds: Range
    doubts: tuple[str, ...]


# ---- what is fitted --------------------------------------------------------------------------------------------------


def base_of(name: str | None, launch: Launch) -> Cluster:
    """The cluster whose speeds are scaled.

    Args:
        name: of --cluster; None: what the run computed on, as far as it is recorded.
        launch: of the run.

    Raises:
        ConfigError: the name is not known, it is missing, or it is of other devices than the run's.
    """
    device = launch.device
    named = (one for one, cluster in CLUSTERS.items() if cluster.device.reported_as == device)
    known = "cpu" if device in (None, "cpu") else next(named, None)
    if name is None and known is None:
        raise ConfigError([f"--cluster is missing: the run computed on {device}; name the cluster most like it"])
    base = cluster_named(name or known or "cpu")
    if device is not None and base.on_cpu != (device == "cpu"):
        kind = "computes on CPUs" if base.on_cpu else "has accelerators"
        wanted = "has accelerators" if base.on_cpu else "computes on CPUs"
        others = [other for other, one in CLUSTERS.items() if one.on_cpu != base.on_cpu]
        leave = "" if known is None else "leave --cluster out, or "
        use = f"use --cluster {one_of([*others, f'FILE.toml of a cluster that {wanted}'])}"
        raise ConfigError([f"--cluster {name} {kind}, but the run computed on {device}: {leave}{use}"])
    return base


def machine_of(name: str | None, base: Cluster, run: MeasuredRun, here: Machine | None) -> Machine | None:
    """The machine whose memory and cores the fitted cluster has; None: it keeps the base's.

    Those of the built-in CPU clusters are assumed. Those of a file are the user's, and those of an accelerator are
    facts.

    Args:
        name: of --cluster, or None.
        base: that cluster.
        run: what is fitted to.
        here: this machine, for a run that recorded none and was not elsewhere.
    """
    if not base.on_cpu or (name is not None and name not in CLUSTERS):
        return None
    return run.launch.machine or (None if run.launch.was_elsewhere else here)


def wrong_base(base: Cluster, run: MeasuredRun) -> Iterator[str]:
    """Why a cluster cannot be fitted to a run."""
    precision = run.config.precision.precision
    if base.peak(precision) is None:
        yield f"--cluster {base.name} has no peak for --precision {precision}"


def calibrate(run: MeasuredRun, base: Cluster, machine: Machine | None = None) -> Calibration:
    """Fit a cluster to a run.

    Args:
        run: what it left.
        base: whose speed is scaled.
        machine: whose memory and cores the cluster gets; None: it keeps the base's.

    Raises:
        ConfigError: the base cannot be fitted to the run.
    """
    if problems := list(wrong_base(base, run)):
        raise ConfigError(problems)
    base = base if machine is None else _on_machine(base, machine, run)
    config, steps = scheduled(run.config, base), run.steps
    layers = outline(config)

    def predicted(logs: Vector) -> Vector:
        return np.log([step_time(config, layers, _with_speed(base, math.exp(logs[0]))).seconds])

    measured, most = np.log([steps.median]), np.array([math.log(_MOST)])
    # As --fit, with one constant and one row.
    found = solve(
        predicted, measured, np.array([_ANY_SPEED]), rest=np.zeros((1, 1)), noise=_EXACT, most=most, rounds=40
    )
    speed = math.exp(found.logs[0])
    cluster = _with_speed(base, speed)
    cluster = replace(cluster, device=_widened(cluster.device, steps, math.exp(predicted(found.logs)[0])))
    doubts = tuple(_doubts(run, base, machine, speed))
    name = run.directory.resolve().name
    source = f"fitted to {name if name.isprintable() else ascii(name)}, {steps.median:.4g} s per step"
    source += f"; low confidence: {'; '.join(doubts)}" if doubts else ""
    device = replace(cluster.device, name=f"{base.name.removesuffix('-fitted')}-fitted")
    return Calibration(
        run=run,
        base=base,
        cluster=replace(cluster, source=source, device=device),
        machine=machine,
        base_seconds=step_time(config, layers, base).seconds,
        device_speed=speed,
        seconds=Range(*(step_time(config, layers, cluster, case=case).seconds for case in CASES)),
        doubts=doubts,
    )


def _doubts(run: MeasuredRun, base: Cluster, machine: Machine | None, speed: float) -> Iterator[str]:
    if run.steps.slow > _UNSTEADY * run.steps.fast:
        yield f"steps differ by a factor of {run.steps.slow / run.steps.fast:.2g}"
    if machine is not None and (local := _local_ranks(run)) > machine.cores:
        yield f"{counted(local, 'rank')} shared {counted(machine.cores, 'core')}"
    if not 1.01 / _MOST < speed < _MOST / 1.01:
        yield f"{base.name} is more than {_MOST:,.0f} times faster or slower than this run"


def _on_machine(base: Cluster, machine: Machine, run: MeasuredRun) -> Cluster:
    """With the machine's memory, and a device for each core.

    More ranks than cores share them, and remain on one machine. Where a run had several machines, each of its nodes has
    as many devices as ranks.
    """
    world, local = run.config.parallel.ranks, _local_ranks(run)
    ranks = local if local < world else max(machine.cores, local)
    device, before = base.device, base.device.node_ranks
    network = replace(device.network, bandwidth=device.network.bandwidth * before / ranks)
    device = replace(device, memory_bytes=machine.memory_bytes, node_ranks=ranks, network=network)
    return replace(base, device=device)


def _local_ranks(run: MeasuredRun) -> int:
    return min(run.launch.local_ranks or run.config.parallel.ranks, run.config.parallel.ranks)


def _with_speed(cluster: Cluster, factor: float) -> Cluster:
    """All that a device does by itself, faster by a factor."""
    device = cluster.device

    def shorter(times: Range) -> Range:
        return Range(times.slow / factor, times.expected / factor, times.fast / factor)

    return replace(
        cluster,
        device=replace(
            device,
            memory_bandwidth=device.memory_bandwidth * factor,
            launch_seconds=shorter(device.launch_seconds),
            host_seconds=shorter(device.host_seconds),
        ),
        peaks={form: peak * factor for form, peak in cluster.peaks.items()},
    )


def _widened(device: Device, steps: Steps, predicted: float) -> Device:
    """With the spread of the measured steps, as the fit predicts them, instead of an assumed one."""
    slow = max(min(1 - _SPREAD, predicted / steps.slow), _WIDEST)
    fast = max(1 + _SPREAD, predicted / steps.fast)

    def share(values: Range) -> Range:
        return Range(values.expected * slow, values.expected, min(values.expected * fast, 1.0))

    def seconds(times: Range) -> Range:
        return Range(times.expected / slow, times.expected, times.expected / fast)

    return replace(
        device,
        launch_seconds=seconds(device.launch_seconds),
        host_seconds=seconds(device.host_seconds),
        product_efficiency=share(device.product_efficiency),
        attention_efficiency=share(device.attention_efficiency),
        memory_efficiency=share(device.memory_efficiency),
    )


# ---- what --calibrate prints -----------------------------------------------------------------------------------------


def calibration_text(fit: Calibration) -> str:
    """The figures of a fit in words, a line for each."""
    return "\n".join(_lines(fit))


def _lines(fit: Calibration) -> Iterator[str]:
    steps, base, before, after = fit.run.steps, fit.base.name, fit.base_seconds, fit.seconds
    yield (
        f"measured step: {steps.median:.4g} s, the median of {counted(steps.rows, 'logged row')} without the first "
        f"{steps.left_out}; most steps take {steps.fast:.4g} to {steps.slow:.4g} s"
    )
    yield from _machine(fit)
    yield f"predicted for {base}: {before:.4g} s ({before / steps.median - 1:+.0%})"
    yield f"speed of a device: x {fit.device_speed:.3g}, from the step times"
    yield f"speed of the links: that of {base}; rows of several layouts measure it: --fit"
    off = round(after.expected / steps.median - 1, 6) + 0.0  # no -0.0
    yield f"predicted with it: {after.expected:.4g} s ({off:+.1%}), range {after.fast:.4g} to {after.slow:.4g} s"
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
        "device_speed": fit.device_speed,
        "low_confidence": bool(fit.doubts),
        "doubts": list(fit.doubts),
    }
