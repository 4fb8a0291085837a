"""Fits a cluster's speeds to a run: what its devices computed, from its trace, and what is left of its steps.

Two constants are fitted, which a run can tell apart: the speed of a device (of products and of memory alike), and with
several ranks the speed of the links. The first makes the sum of a pipeline's computations what the trace measured; the
second makes a step as long as the metrics say. Without a trace only the first is fitted, to the steps.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import load_toml
from megacore.config.dimensions import degrees_of
from megacore.errors import ConfigError, UserError
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Device, Link, Range
from megacore.plan.outline import outline
from megacore.plan.planner import scheduled
from megacore.plan.simulator import Costs
from megacore.plan.stage_time import speed_of
from megacore.plan.step_time import pipeline_costs, step_time
from megacore.plan.trace import read_trace

_SPREAD = 0.1  # of a fitted speed, to both sides
_LEAST, _MOST = 1e-4, 1e4  # factors


@dataclass(frozen=True)
class Calibration:
    """A fitted cluster, and what was fitted in words."""

    cluster: Cluster
    report: list[str]


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
    seconds = _step_seconds(directory / "metrics.jsonl", problems)
    if problems or config is None or seconds is None:
        raise ConfigError(problems)
    if base.peak(config.precision.precision) is None:
        raise ConfigError([f"--cluster {base.name} has no peak for --precision {config.precision.precision}"])
    config, layers = scheduled(config, base), outline(config)

    def step(cluster: Cluster) -> float:
        return step_time(config, layers, cluster).seconds

    def computed(cluster: Cluster) -> float:
        time = step_time(config, layers, cluster)
        return _sum(pipeline_costs(config, time.stages, speed_of(config, cluster, "expected")))

    before = step(base)
    trace = directory / "trace.json"
    report = [
        f"measured step: {seconds:.4g} s; predicted for {base.name}: {before:.4g} s ({before / seconds - 1:+.0%})"
    ]
    if not trace.exists() or config.parallel.pp == 1:
        factor, cluster = _fitted(base, _with_speed, step, seconds)
        report.append(
            f"speed of a device: x {factor:.3g}, from the steps (a run with --pp 2 or more and --trace tells more)"
        )
    else:
        measured = _sum(read_trace(trace).costs) / 1e3
        factor, cluster = _fitted(base, _with_speed, computed, measured)
        report.append(f"speed of a device: x {factor:.3g}, from {trace.name}")
        if step(_with_links(cluster, _MOST)) < seconds:
            links, cluster = _fitted(cluster, _with_links, step, seconds)
            report.append(f"speed of the links: x {links:.3g}, from the steps")
    after = step(cluster)
    report.append(f"predicted with it: {after:.4g} s ({after / seconds - 1:+.1%})")
    cluster = replace(cluster, source=f"fitted to {directory.name}, {seconds:.4g} s per step")
    return Calibration(replace(cluster, device=_narrow(replace(cluster.device, name=f"{base.name}-fitted"))), report)


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


def _narrow(device: Device) -> Device:
    """With the spread of a fitted speed instead of an assumed one."""

    def narrow(values: Range) -> Range:
        middle = values.expected
        return Range(middle * (1 - _SPREAD), middle, min(middle * (1 + _SPREAD), 1.0))

    return replace(
        device,
        product_efficiency=narrow(device.product_efficiency),
        attention_efficiency=narrow(device.attention_efficiency),
        memory_efficiency=narrow(device.memory_efficiency),
        link_efficiency=narrow(device.link_efficiency),
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


def _step_seconds(path: Path, problems: list[str]) -> float | None:
    """The median of the later half of the records: the first steps warm up."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        problems.append(f"--calibrate {path.parent}: {path.name} cannot be read: {error.strerror}")
        return None
    times = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the end of a line that a killed run did not finish
        value = record.get("perf/step_time_s") if isinstance(record, dict) else None
        if isinstance(value, (int, float)) and value > 0:
            times.append(float(value))
    if not times:
        problems.append(
            f"--calibrate {path.parent}: {path.name} has no perf/step_time_s: give a run of 4 steps or more"
        )
        return None
    return statistics.median(times[len(times) // 2 :])
