"""Fits a cluster's speeds to a run: what its devices computed and what its transfers took, from its trace.

Two constants are fitted: the speed of a device (of products and of memory alike), and that of the links. The first
makes the computations as large a share of a step as they were in the traced steps, and a step is the median of all
logged ones without the first. The second is from transfers that were waited for and nothing else (trace.py); a trace
without any leaves the links as they were. Without a trace only the speed of a device is fitted, to the steps.

What the constants do not explain (waits, uneven stages, the program itself, a busy machine) belongs to none of them: it
is reported, and it and the spread of the steps widen the range of the fitted cluster.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import load_toml
from megacore.config.dimensions import degrees_of
from megacore.config.messages import counted
from megacore.config.parallel import ScheduleName
from megacore.errors import ConfigError, UserError
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Device, Link, Range
from megacore.plan.outline import outline
from megacore.plan.planner import scheduled
from megacore.plan.roofline import Transfer, transfer_seconds
from megacore.plan.simulator import Costs
from megacore.plan.stage_time import speed_of
from megacore.plan.state import PlannedLayer
from megacore.plan.step_time import pipeline_costs, step_time
from megacore.plan.trace import MeasuredTransfers, read_trace, read_transfers
from megacore.plan.traffic import stage_message

_SPREAD = 0.1  # of a fitted speed, to both sides, at least
_WIDEST = 0.05  # share of a speed that its slow case has at least
_LEAST, _MOST = 1e-4, 1e4  # factors of a device's speed
# Of the links. Links that are ten times faster or slower than a data sheet are others, or the machine is busy.
_SLOWEST_LINKS, _FASTEST_LINKS = 0.1, 10.0
_FEW = 3  # rows, or transfers, that are too few to tell a median
_UNEXPLAINED, _UNSTEADY = 0.15, 1.3  # beyond which a fit is poor: a share of the step; slow steps by fast steps


@dataclass(frozen=True)
class Calibration:
    """A fitted cluster, and what was fitted in words."""

    cluster: Cluster
    report: list[str]


class _Steps(NamedTuple):
    """The steps of a run without the first, in seconds.

    Attributes:
        rows: that are used.
        left_out: first rows.
        fast, median, slow: a tenth of the rows is below `fast`, and a tenth is above `slow`.
    """

    rows: int
    left_out: int
    fast: float
    median: float
    slow: float


class _Links(NamedTuple):
    """What a trace says of the links.

    Attributes:
        factor: measured speed by that of the data sheet.
        transfers: their number.
        slow: share of the median speed that nine of ten transfers reach.
    """

    factor: float
    transfers: int
    slow: float


def calibrate(directory: Path, base: Cluster) -> Calibration:
    """Fit a cluster to the run that wrote a directory.

    Args:
        directory: `--output-dir` of a run.
        base: whose capacities are kept, and whose speeds are scaled.

    Raises:
        ConfigError: everything that is missing or unreadable.
    """
    if not directory.is_dir():
        raise ConfigError([f"--calibrate {directory} is not a directory: give the --output-dir of a run"])
    problems: list[str] = []
    config = _config(directory, problems)
    steps = _steps(directory / "metrics.jsonl", problems)
    if problems or config is None or steps is None:
        raise ConfigError(problems)
    if base.peak(config.precision.precision) is None:
        raise ConfigError([f"--cluster {base.name} has no peak for --precision {config.precision.precision}"])
    trace = directory / "trace.json"
    try:
        transfers = read_transfers(trace) if trace.exists() else None
        fit = _Fit(config, base, steps, trace, transfers)
    except UserError as error:
        raise ConfigError([f"--calibrate {directory}: {error}"]) from None
    return fit.calibration(directory.name)


class _Fit:
    """The fit of one run.

    Raises:
        UserError: the trace cannot be read.
    """

    def __init__(
        self, config: ResolvedConfig, base: Cluster, steps: _Steps, trace: Path, transfers: MeasuredTransfers | None
    ) -> None:
        self.base, self.steps, self.transfers = base, steps, transfers
        passes = [] if transfers is None else [read_trace(trace, step) for step in transfers.passes]
        config = scheduled(config, base)
        if passes and config.parallel.schedule_csv is None:
            ran = passes[0].schedule  # which the run had chosen, where its flags leave it open
            names: tuple[ScheduleName, ...] = get_args(ScheduleName)
            name = next((known for known in names if known == ran.name), config.parallel.schedule)
            parallel = replace(config.parallel, schedule=name, virtual_stages=ran.virtual_stages)
            config = replace(config, parallel=parallel)
        self.config: ResolvedConfig = config
        self.layers: list[PlannedLayer] = list(outline(config))
        lengths = {} if transfers is None else transfers.passes
        shares = [_sum(one.costs) / 1e3 / lengths[one.step] for one in passes if lengths[one.step] > 0]
        self.computed = statistics.median(shares) * steps.median if shares else None

    def calibration(self, name: str) -> Calibration:
        """The fitted cluster, with its report."""
        steps, before = self.steps, self._step(self.base)
        report = [
            f"measured step: {steps.median:.4g} s, the median of {counted(steps.rows, 'logged row')} without the first "
            f"{steps.left_out}; most steps take {steps.fast:.4g} to {steps.slow:.4g} s",
            f"predicted for {self.base.name}: {before:.4g} s ({before / steps.median - 1:+.0%})",
        ]
        links = self._links()
        cluster, doubts = self.base, list(self._doubts_of_steps())
        if links is not None:
            bounded = min(max(links.factor, _SLOWEST_LINKS), _FASTEST_LINKS)
            cluster = _with_links(cluster, bounded)
            said = f"speed of the links: x {bounded:.3g}, from {counted(links.transfers, 'transfer')} in trace.json"
            if bounded != links.factor:
                said += f" (measured x {links.factor:.3g}, which is not realistic: something delayed the ranks)"
                doubts.append("transfers were too slow or too fast for real links")
            report.append(said)
        wanted, predict = (steps.median, self._step) if self.computed is None else (self.computed, self._computed)
        speed, cluster = _fitted(cluster, _with_speed, predict, wanted)
        source = "the step times (--trace gives more, and with --pp 2 or --tp 2 also the speed of the links)"
        if self.computed is not None:
            source = "the computations in trace.json"
        report.append(f"speed of a device: x {speed:.3g}, from {source}")
        if links is None:
            report.append(f"speed of the links: that of {self.base.name}; this run does not measure it")
        elif self.transfers is not None and not self.transfers.sums:
            report.append("not measured: all-reduces over --tp ranks; assumed as fast as pipeline messages")
        after = self._step(cluster)
        unexplained = steps.median / after - 1
        cluster = replace(cluster, device=_widened(cluster.device, steps, after, links))
        slow, fast = (step_time(self.config, self.layers, cluster, case=case).seconds for case in ("slow", "fast"))
        report.append(
            f"predicted with it: {after:.4g} s ({after / steps.median - 1:+.1%}), range {fast:.4g} to {slow:.4g} s"
        )
        if self.computed is not None:
            report.append(
                f"unexplained: {steps.median - after:+.3g} s ({unexplained:+.1%}): waits, uneven stages, host "
                "overhead, other programs; it widens the range"
            )
        if abs(unexplained) > _UNEXPLAINED:
            doubts.append(f"{abs(unexplained):.0%} of the step are unexplained")
        source = f"fitted to {name}, {steps.median:.4g} s per step"
        if doubts:
            source += f"; low confidence: {'; '.join(doubts)}"
            report.append(f"low confidence: {'; '.join(doubts)}. Predictions of other layouts may be far off")
        device = replace(cluster.device, name=f"{self.base.name}-fitted")
        return Calibration(replace(cluster, source=source, device=device), report)

    def _doubts_of_steps(self) -> Iterator[str]:
        if self.steps.rows < _FEW:
            yield f"only {counted(self.steps.rows, 'logged row')}: train for 10 steps or more with --log-interval 1"
        if self.steps.slow > _UNSTEADY * self.steps.fast:
            yield f"steps differ by a factor of {self.steps.slow / self.steps.fast:.2g}"

    def _step(self, cluster: Cluster) -> float:
        return step_time(self.config, self.layers, cluster).seconds

    def _computed(self, cluster: Cluster) -> float:
        time = step_time(self.config, self.layers, cluster)
        return _sum(pipeline_costs(self.config, time.stages, speed_of(self.config, cluster, "expected")))

    def _links(self) -> _Links | None:
        """The speed of transfers that were waited for, compared with the base's."""
        if self.transfers is None:
            return None
        device = self.base.device
        ratios: list[float] = []
        if self.transfers.messages and self.config.parallel.pp > 1:
            predicted = stage_message(self.config).seconds(device)
            ratios += [predicted / seconds for seconds in self.transfers.messages]
        for one in self.transfers.sums:
            transfer = Transfer(
                name="sum",
                phase="forward",
                number=0,
                role="layer",
                pattern="all-reduce",
                bytes=one.bytes,
                ranks=one.ranks,
            )
            ratios += [transfer_seconds(transfer, device) / seconds for seconds in one.seconds]
        if len(ratios) < _FEW:
            return None
        middle = statistics.median(ratios)
        return _Links(middle, len(ratios), _quantile(ratios, 0.1) / middle)


def _quantile(values: list[float], share: float) -> float:
    """The value below which this share of the others is, between two of them if need be."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _sum(costs: Costs) -> float:
    return sum(map(sum, (costs.forward, costs.input_grad, costs.weight_grad)))


def _fitted(
    cluster: Cluster, scaled: Callable[[Cluster, float], Cluster], predict: Callable[[Cluster], float], wanted: float
) -> tuple[float, Cluster]:
    """The factor by which `predict` becomes `wanted`: larger factors predict less. By bisection."""
    low, high = _LEAST, _MOST
    for _ in range(60):
        middle = (low * high) ** 0.5
        if predict(scaled(cluster, middle)) > wanted:
            low = middle
        else:
            high = middle
    return high, scaled(cluster, high)


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


def _widened(device: Device, steps: _Steps, predicted: float, links: _Links | None) -> Device:
    """With the spread of the measured steps, as the fit predicts them, instead of an assumed one; links that were not
    measured keep theirs."""
    slow = max(min(1 - _SPREAD, predicted / steps.slow), _WIDEST)
    fast = max(1 + _SPREAD, predicted / steps.fast)

    def spread(values: Range, slow: float = slow) -> Range:
        middle = values.expected
        return Range(middle * slow, middle, min(middle * fast, 1.0))

    def seconds(times: Range) -> Range:
        return Range(times.expected / slow, times.expected, times.expected / fast)

    return replace(
        device,
        launch_seconds=seconds(device.launch_seconds),
        host_seconds=seconds(device.host_seconds),
        product_efficiency=spread(device.product_efficiency),
        attention_efficiency=spread(device.attention_efficiency),
        memory_efficiency=spread(device.memory_efficiency),
        link_efficiency=device.link_efficiency
        if links is None
        else spread(device.link_efficiency, max(min(slow, links.slow), _WIDEST)),
    )


def _config(directory: Path, problems: list[str]) -> ResolvedConfig | None:
    path = directory / "config.toml"
    if not path.exists():
        problems.append(f"--calibrate {directory}: {path.name} is missing: give the --output-dir of a run")
        return None
    try:
        is_bert = "bert" in tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, tomllib.TOMLDecodeError):
        is_bert = False  # `load_toml` says what is wrong
    try:
        config = load_toml(path, BertConfig if is_bert else Config)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    except (OSError, UserError) as error:
        problems.append(f"--calibrate {directory}: {error}")
        return None
    degrees = degrees_of(partial(getattr, config.parallel))
    if config.model.vocab_size is None or None in degrees.values():
        problems.append(
            f"{path}: vocab_size or a parallel degree is missing: give the --output-dir of a run, which has them all"
        )
        return None
    resolved: ResolvedConfig = config.resolve(math.prod(degrees.values()))
    return resolved


def _steps(path: Path, problems: list[str]) -> _Steps | None:
    """All records without the first quarter, in which caches, threads and memory warm up."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        problems.append(f"--calibrate {path.parent}: {path.name} cannot be read: {why}")
        return None
    times = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the end of a line that a killed run did not finish
        value = record.get("perf/step_time_s") if isinstance(record, dict) else None
        if isinstance(value, (int, float)) and 0 < value < math.inf:
            times.append(float(value))
    if not times:
        problems.append(
            f"--calibrate {path.parent}: {path.name} has no perf/step_time_s: give a run of 4 steps or more"
        )
        return None
    first = max(len(times) // 4, min(len(times) - 1, 1))
    used = times[first:]
    return _Steps(len(used), first, _quantile(used, 0.1), statistics.median(used), _quantile(used, 0.9))
