"""The schedule of --schedule auto: of those that fit into memory, the one that the simulator predicts to be fastest;
and the stages of --pipeline-balance time.

Predictions are of whole steps (step_time.py). Another schedule than 1F1B must be faster by a margin, because
predictions err and 1F1B needs the least memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.parallel import (
    AUTO_SCHEDULE,
    ChosenSchedule,
    ChosenScheduleThatFits,
    ScheduleName,
    StagesThatFit,
)
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.state import PlannedLayer
from megacore.plan.step_time import step_seconds

VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 12)
"""Stages per rank that are tried."""
_MARGIN = 0.02


def typical_cluster(*, on_cpu: bool, device_name: str = "") -> Cluster:
    """The cluster by which a launch predicts: of the device that the driver names so, else of a common one."""
    known = (cluster for cluster in CLUSTERS.values() if cluster.device.reported_as == device_name)
    return CLUSTERS["laptop"] if on_cpu else next(known, CLUSTERS["a100-80g"])


def is_open(config: ResolvedConfig) -> bool:
    """Whether there is a schedule to choose."""
    parallel = config.parallel
    return parallel.schedule == AUTO_SCHEDULE and parallel.pp > 1 and parallel.schedule_csv is None


def is_auto(config: ResolvedConfig) -> bool:
    """Whether --schedule auto chooses, or has chosen, the schedule."""
    parallel = config.parallel
    is_chosen = isinstance(parallel, ChosenSchedule) or parallel.schedule == AUTO_SCHEDULE
    return is_chosen and parallel.schedule_csv is None


class ScheduleChoice(NamedTuple):
    """Values of `--schedule` and `--virtual-stages`."""

    name: ScheduleName
    virtual_stages: int = 1


_ONE_BY_ONE = ScheduleChoice("1f1b")


def schedules_by_time(
    config: ResolvedConfig,
    layers: Sequence[PlannedLayer],
    cluster: Cluster,
    *,
    fits: Callable[[ResolvedConfig], bool] | None = None,
) -> list[ScheduleChoice]:
    """The schedules that are faster than 1F1B, the fastest first, and last 1F1B.

    Args:
        config: a resolved configuration with several pipeline ranks.
        layers: the whole model.
        cluster: that computes.
        fits: whether every rank has the memory for a configuration: others are left out. None: all are in.
    """
    config = config.for_device(on_cpu=cluster.on_cpu)
    if cluster.peak(config.precision.precision) is None and config.logging.peak_tflops is None:
        return [_ONE_BY_ONE]
    others = [] if config.training.recompute == "full" else [ScheduleChoice("zero-bubble")]
    if config.parallel.pipeline_layout is None:
        possible = (v for v in VIRTUAL_STAGES if config.parallel.pp * v <= config.model.num_layers)
        others += (ScheduleChoice("interleaved", v) for v in possible)

    if fits is not None:
        others = [choice for choice in others if fits(_with_schedule(config, choice))]
    if not others:
        return [_ONE_BY_ONE]

    def seconds(choice: ScheduleChoice) -> float:
        return step_seconds(_with_schedule(config, choice), layers, cluster)

    most = (1.0 - _MARGIN) * seconds(_ONE_BY_ONE)
    timed = sorted((seconds(choice), choice) for choice in others)
    return [*(choice for time, choice in timed if time <= most), _ONE_BY_ONE]


def choose_schedule(
    config: ResolvedConfig, choices: Sequence[ScheduleChoice], fits: Callable[[ResolvedConfig], bool]
) -> ResolvedConfig:
    """The configuration with the first schedule that fits, or the last.

    Args:
        config: a resolved configuration.
        choices: as `schedules_by_time` returns them.
        fits: whether every rank has the memory for a configuration. The last choice is not asked about.
    """
    *faster, last = (_with_schedule(config, choice) for choice in choices)
    return next((candidate for candidate in faster if fits(candidate)), last)


def fastest_that_fits(
    config: ResolvedConfig, layers: Sequence[PlannedLayer], cluster: Cluster, fits: Callable[[ResolvedConfig], bool]
) -> ResolvedConfig:
    """What `choose_schedule` chooses of all schedules by time. Times are computed only of those that fit.

    Args:
        config: a resolved configuration with several pipeline ranks.
        layers: the whole model.
        cluster: that computes.
        fits: whether every rank has the memory for a configuration.
    """
    return _with_schedule(config, schedules_by_time(config, layers, cluster, fits=fits)[0])


def with_stages_that_fit(config: ResolvedConfig, fits: Callable[[ResolvedConfig], bool]) -> ResolvedConfig:
    """The configuration with stages balanced by parameters, where those balanced by time do not fit and these do.

    Args:
        config: a resolved configuration, with its schedule.
        fits: whether every rank has the memory for a configuration.
    """
    parallel = config.parallel
    is_open = parallel.pipeline_balance == "time" and parallel.pipeline_layout is None
    if parallel.pp == 1 or not is_open or fits(config):
        return config
    kind = ChosenScheduleThatFits if isinstance(parallel, ChosenSchedule) else StagesThatFit
    by_parameters = dataclasses.replace(config, parallel=parallel.resolved_as(kind, pipeline_balance="parameters"))
    return by_parameters if fits(by_parameters) else config


def _with_schedule(config: ResolvedConfig, choice: ScheduleChoice) -> ResolvedConfig:
    name, virtual_stages = choice
    parallel = config.parallel.resolved_as(ChosenSchedule, schedule=name, virtual_stages=virtual_stages)
    return dataclasses.replace(config, parallel=parallel)
