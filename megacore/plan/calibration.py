"""Fits a cluster's speeds to a run: what its devices computed and what its transfers took, from its trace.

Two constants are fitted: the speed of a device (of products and of memory alike), and that of the links. The first
makes the computations as large a share of a step as they were in the traced steps, and a step is the median of all
logged ones without the first. The second is from transfers that were waited for and nothing else (trace.py); a trace
without any leaves the links as they were. Without a trace only the speed of a device is fitted, to the steps.

What the constants do not explain (waits, uneven stages, the program itself, a busy machine) belongs to none of them: it
is reported, and it and the spread of the steps widen the range of the fitted cluster.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from megacore.config import ResolvedConfig
from megacore.config.messages import counted, one_of
from megacore.config.parallel import ScheduleName
from megacore.errors import ConfigError, UserError
from megacore.models.outline import ModelLayer, outline
from megacore.pipeline.simulator import Costs
from megacore.pipeline.trace_file import read_trace
from megacore.plan.cluster import CLUSTERS, FIELDS, Cluster, cluster_named, to_toml
from megacore.plan.devices import Device, Link, Range
from megacore.plan.measured_run import Launch, Machine, MeasuredRun, Steps, quantile
from megacore.plan.plan_json import described
from megacore.plan.planner import Figure, Origin, scheduled
from megacore.plan.roofline import Collective, transfer_seconds
from megacore.plan.row_fit import Vector, solve
from megacore.plan.size_unit import size_unit
from megacore.plan.stage_time import speed_of
from megacore.plan.step_time import pipeline_costs, step_time
from megacore.plan.traffic import stage_message

_SPREAD = 0.1  # of a fitted speed, to both sides, at least
_WIDEST = 0.05  # share of a speed that its slow case has at least
_LEAST, _MOST = 1e-4, 1e4  # factors of a device's speed
# One row is taken at its word: the prior of the speed's logarithm is wide, and the noise of the row narrow.
_ANY_SPEED, _EXACT, _INSTANT = 10.0, 1e-6, 1e-12
# Of the links. Links that are ten times faster or slower than a data sheet are others, or the machine is busy.
_SLOWEST_LINKS, _FASTEST_LINKS = 0.1, 10.0
_FEW = 3  # transfers that are too few to tell a median
_UNEXPLAINED, _UNSTEADY = 0.15, 1.3  # beyond which a fit is poor: a share of the step; slow steps by fast steps


class LinkSpeed(NamedTuple):
    """What a trace says of the links.

    Attributes:
        measured: measured speed by that of the data sheet.
        fitted: the same within what is realistic.
        transfers: their number.
        slow: share of the median speed that nine of ten transfers reach.
    """

    measured: float
    fitted: float
    transfers: int
    slow: float


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
        links: the same of the links; None: not measured, and so the base's.
        seconds: of a step, predicted for the fitted cluster: fast, expected and slow.
        is_traced: whether the speed of a device is from the traced computations; otherwise it is from the steps.
        doubts: why predictions may be far off.
    """

    run: MeasuredRun
    base: Cluster
    cluster: Cluster
    machine: Machine | None
    base_seconds: float
    device_speed: float
    links: LinkSpeed | None
    seconds: Range
    is_traced: bool
    doubts: tuple[str, ...]

    @property
    def unexplained(self) -> float:
        """Seconds of a measured step that the fitted speeds do not explain."""
        return self.run.steps.median - self.seconds.expected


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
        base: whose speeds are scaled.
        machine: whose memory and cores the cluster gets; None: it keeps the base's.

    Raises:
        ConfigError: the base cannot be fitted to the run, or its trace cannot be read.
    """
    if problems := list(wrong_base(base, run)):
        raise ConfigError(problems)
    try:
        return _Fit(run, base, machine).calibration()
    except UserError as error:
        said = str(error).removeprefix("--from-trace ")
        raise ConfigError([f"--calibrate {run.directory}: {said}"]) from None


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


class _Fit:
    """The fit of one run.

    Raises:
        UserError: the trace cannot be read.
    """

    def __init__(self, run: MeasuredRun, base: Cluster, machine: Machine | None) -> None:
        self.run, self.machine = run, machine
        self.base = base if machine is None else _on_machine(base, machine, run)
        steps, transfers = run.steps, run.transfers
        passes = [] if transfers is None else [read_trace(run.trace, step) for step in transfers.passes]
        config = scheduled(run.config, self.base)
        if passes and config.parallel.schedule_csv is None:
            ran = passes[0].schedule  # which the run had chosen, where its flags leave it open
            names: tuple[ScheduleName, ...] = get_args(ScheduleName)
            name = next((known for known in names if known == ran.name), config.parallel.schedule)
            parallel = replace(config.parallel, schedule=name, virtual_stages=ran.virtual_stages)
            config = replace(config, parallel=parallel)
        self.config: ResolvedConfig = config
        self.layers: list[ModelLayer] = list(outline(config))
        lengths = {} if transfers is None else transfers.passes
        shares = [_sum(one.costs) / 1e3 / lengths[one.step] for one in passes if lengths[one.step] > 0]
        self.computed = statistics.median(shares) * steps.median if shares else None

    def calibration(self) -> Calibration:
        """The fitted cluster, with its figures."""
        steps, links = self.run.steps, self._links()
        cluster = self.base if links is None else _with_links(self.base, links.fitted)
        wanted, predict = (steps.median, self._step) if self.computed is None else (self.computed, self._computed)
        speed, cluster = _fitted(cluster, predict, wanted)
        after = self._step(cluster)
        cluster = replace(cluster, device=_widened(cluster.device, steps, after, links))
        slow, fast = (step_time(self.config, self.layers, cluster, case=case).seconds for case in ("slow", "fast"))
        doubts = tuple(self._doubts(links, speed, unexplained=steps.median / after - 1))
        name = self.run.directory.resolve().name
        source = f"fitted to {name if name.isprintable() else ascii(name)}, {steps.median:.4g} s per step"
        source += f"; low confidence: {'; '.join(doubts)}" if doubts else ""
        device = replace(cluster.device, name=f"{self.base.name.removesuffix('-fitted')}-fitted")
        return Calibration(
            run=self.run,
            base=self.base,
            cluster=replace(cluster, source=source, device=device),
            machine=self.machine,
            base_seconds=self._step(self.base),
            device_speed=speed,
            links=links,
            seconds=Range(slow, after, fast),
            is_traced=self.computed is not None,
            doubts=doubts,
        )

    def _doubts(self, links: LinkSpeed | None, speed: float, *, unexplained: float) -> Iterator[str]:
        steps = self.run.steps
        if steps.slow > _UNSTEADY * steps.fast:
            yield f"steps differ by a factor of {steps.slow / steps.fast:.2g}"
        if self.machine is not None and (local := _local_ranks(self.run)) > self.machine.cores:
            yield f"{counted(local, 'rank')} shared {counted(self.machine.cores, 'core')}"
        if links is not None and links.fitted != links.measured:
            yield "transfers were too slow or too fast for real links"
        if not _LEAST * 1.01 < speed < _MOST / 1.01:
            yield f"{self.base.name} is more than {_MOST:,.0f} times faster or slower than this run"
        if abs(unexplained) > _UNEXPLAINED:
            yield f"the step takes {abs(unexplained):.0%} {'more' if unexplained > 0 else 'less'} time than predicted"

    def _step(self, cluster: Cluster) -> float:
        return step_time(self.config, self.layers, cluster).seconds

    def _computed(self, cluster: Cluster) -> float:
        time = step_time(self.config, self.layers, cluster)
        return _sum(pipeline_costs(self.config, time.stages, speed_of(self.config, cluster, "expected")))

    def _links(self) -> LinkSpeed | None:
        """The speed of transfers that were waited for, compared with the base's."""
        transfers, device = self.run.transfers, self.base.device
        if transfers is None:
            return None
        ratios: list[float] = []
        if transfers.messages and self.config.parallel.pp > 1:
            predicted = stage_message(self.config).seconds(device)
            ratios += [predicted / seconds for seconds in transfers.messages]
        for one in transfers.sums:
            among = range(self.config.parallel.ranks)
            transfer = Collective(pattern="all-reduce", bytes=one.bytes, ranks=one.ranks, among=among)
            ratios += [transfer_seconds(transfer, device) / seconds for seconds in one.seconds]
        if len(ratios) < _FEW:
            return None
        middle = statistics.median(ratios)
        bounded = min(max(middle, _SLOWEST_LINKS), _FASTEST_LINKS)
        return LinkSpeed(middle, bounded, len(ratios), quantile(ratios, 0.1) / middle)


def _sum(costs: Costs) -> float:
    return sum(map(sum, (costs.forward, costs.input_grad, costs.weight_grad)))


# ---- how a cluster is scaled -----------------------------------------------------------------------------------------


def _fitted(cluster: Cluster, predict: Callable[[Cluster], float], wanted: float) -> tuple[float, Cluster]:
    """The factor of a device's speed by which `predict` becomes `wanted`: as --fit, with one constant and one row."""

    def predicted(logs: Vector) -> Vector:
        return np.log([predict(_with_speed(cluster, math.exp(logs[0])))])

    found = solve(
        predicted,
        np.log([max(wanted, _INSTANT)]),
        np.array([_ANY_SPEED]),
        rest=np.zeros((1, 1)),
        noise=_EXACT,
        most=np.array([math.log(_MOST)]),
        rounds=40,
    )
    factor = math.exp(found.logs[0])
    return factor, _with_speed(cluster, factor)


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


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    """Links of `factor` times the bandwidth, and that part of the latency."""

    def faster(link: Link) -> Link:
        return Link(bandwidth=link.bandwidth * factor, latency=link.latency / factor)

    device = cluster.device
    return replace(cluster, device=replace(device, node_link=faster(device.node_link), network=faster(device.network)))


def _widened(device: Device, steps: Steps, predicted: float, links: LinkSpeed | None) -> Device:
    """With the spread of the measured steps, as the fit predicts them, instead of an assumed one; links that were not
    measured keep theirs."""
    slow = max(min(1 - _SPREAD, predicted / steps.slow), _WIDEST)
    fast = max(1 + _SPREAD, predicted / steps.fast)

    def spread(values: Range, slow: float = slow) -> Range:
        middle = values.expected
        return Range(middle * slow, middle, min(middle * fast, 1.0))

    def seconds(times: Range) -> Range:
        return Range(times.expected / slow, times.expected, times.expected / fast)

    def of_links(values: Range) -> Range:
        return values if links is None else spread(values, max(min(slow, links.slow), _WIDEST))

    return replace(
        device,
        launch_seconds=seconds(device.launch_seconds),
        host_seconds=seconds(device.host_seconds),
        product_efficiency=spread(device.product_efficiency),
        attention_efficiency=spread(device.attention_efficiency),
        memory_efficiency=spread(device.memory_efficiency),
        link_efficiency=of_links(device.link_efficiency),
        network_efficiency=of_links(device.network_efficiency),
    )


# ---- what --calibrate prints -----------------------------------------------------------------------------------------


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
    for name, field in FIELDS.items():
        yield name, (field["unit"], origins[field["by"]])
