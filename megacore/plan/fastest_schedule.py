"""The schedule of --schedule auto: of those that fit into memory, the one that the simulator predicts to be fastest.

Predictions are of step_time.py. Another schedule than 1F1B must be faster by a margin, because predictions err and 1F1B
needs the least memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from megacore.config import ResolvedConfig
from megacore.config.sections import AUTO_SCHEDULE, ChosenSchedule
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.memory import PlannedLayer
from megacore.plan.step_time import pipeline_time

_VIRTUAL_STAGES = 2  # more of them send more messages, and rarely pay
_MARGIN = 0.02


def typical_cluster(*, on_cpu: bool, device_name: str = "") -> Cluster:
    """The cluster by which a launch predicts: of the device that the driver names so, else of a common one."""
    known = (cluster for cluster in CLUSTERS.values() if cluster.device.reported_as == device_name)
    return CLUSTERS["laptop"] if on_cpu else next(known, CLUSTERS["a100-80g"])


def is_open(config: ResolvedConfig) -> bool:
    """Whether there is a schedule to choose."""
    parallel = config.parallel
    return parallel.schedule == AUTO_SCHEDULE and parallel.pp > 1 and parallel.schedule_csv is None


def schedules_by_time(config: ResolvedConfig, layers: Sequence[PlannedLayer], cluster: Cluster) -> list[ResolvedConfig]:
    """The configuration with each schedule that is faster than 1F1B, the fastest first, and last with 1F1B.

    Args:
        config: a resolved configuration with several pipeline ranks.
        layers: the whole model.
        cluster: that computes.
    """
    last = _with_schedule(config, "1f1b")
    if cluster.peak(config.precision.precision) is None and config.logging.peak_tflops is None:
        return [last]
    others = [_with_schedule(config, "zero-bubble")]
    by_hand = config.parallel.pipeline_layout is not None
    if config.parallel.pp * _VIRTUAL_STAGES <= config.model.num_layers and not by_hand:
        others.append(_with_schedule(config, "interleaved", _VIRTUAL_STAGES))
    most = (1.0 - _MARGIN) * pipeline_time(last, layers, cluster)
    timed = [(pipeline_time(candidate, layers, cluster), candidate) for candidate in others]
    faster = [one for one in timed if one[0] <= most]
    return [*(candidate for _, candidate in sorted(faster, key=lambda one: one[0])), last]


def choose_schedule(candidates: Sequence[ResolvedConfig], fits: Callable[[ResolvedConfig], bool]) -> ResolvedConfig:
    """The first that fits, or the last.

    Args:
        candidates: as `schedules_by_time` returns them.
        fits: whether every rank has the memory for a configuration. The last one is not asked about.
    """
    *faster, last = candidates
    return next((candidate for candidate in faster if fits(candidate)), last)


def _with_schedule(config: ResolvedConfig, name: str, virtual_stages: int = 1) -> ResolvedConfig:
    parallel = config.parallel.resolved_as(ChosenSchedule, schedule=name, virtual_stages=virtual_stages)
    return dataclasses.replace(config, parallel=parallel)
