"""The schedules of --schedule auto, by the time that the simulator predicts.

Predictions are of whole steps (step_time.py). Another schedule than 1F1B must be faster by a margin, because
predictions err and 1F1B needs the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megacore.config import ResolvedConfig
from megacore.config.parallel import V_SCHEDULES
from megacore.models.outline import ModelLayer
from megacore.pipeline.schedule_choice import ONE_FORWARD_ONE_BACKWARD, ScheduleChoice
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.step_time import step_seconds

VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 12)
"""Stages per rank that are tried."""
_MARGIN = 0.02


def typical_cluster(*, on_cpu: bool, device_name: str = "") -> Cluster:
    """The cluster by which a launch predicts: of the device that the driver names so, else of a common one."""
    known = (cluster for cluster in CLUSTERS.values() if cluster.device.reported_as == device_name)
    return CLUSTERS["laptop"] if on_cpu else next(known, CLUSTERS["a100-80g"])


def schedules_by_time(
    config: ResolvedConfig,
    layers: Sequence[ModelLayer],
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
        return [ONE_FORWARD_ONE_BACKWARD]
    whole = config.parallel.async_tp or config.training.cuda_graphs  # a backward is one piece
    splits = config.training.recompute != "full" and not whole
    others = [ScheduleChoice("zero-bubble")] if splits else []
    if config.parallel.pipeline_layout is None:
        possible = [v for v in VIRTUAL_STAGES if config.parallel.pp * v <= config.model.num_layers]
        if splits and 2 in possible and not cluster.on_cpu:  # there a V measured 10 % slower than zero bubble
            others += (ScheduleChoice(name, 2) for name in V_SCHEDULES)
        others += (ScheduleChoice("interleaved", v) for v in possible)

    if fits is not None:
        others = [choice for choice in others if fits(choice.of(config))]
    if not others:
        return [ONE_FORWARD_ONE_BACKWARD]

    def seconds(choice: ScheduleChoice) -> float:
        return step_seconds(choice.of(config), layers, cluster)

    most = (1.0 - _MARGIN) * seconds(ONE_FORWARD_ONE_BACKWARD)
    times = {choice: seconds(choice) for choice in others}
    faster = sorted((choice for choice, time in times.items() if time <= most), key=times.__getitem__)
    return [*faster, ONE_FORWARD_ONE_BACKWARD]


def fastest_that_fits(
    config: ResolvedConfig, layers: Sequence[ModelLayer], cluster: Cluster, fits: Callable[[ResolvedConfig], bool]
) -> ResolvedConfig:
    """The configuration with the fastest schedule of those that fit. Times are computed only of these.

    Args:
        config: a resolved configuration with several pipeline ranks.
        layers: the whole model.
        cluster: that computes.
        fits: whether every rank has the memory for a configuration.
    """
    return schedules_by_time(config, layers, cluster, fits=fits)[0].of(config)
