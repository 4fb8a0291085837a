"""Which settings a run should try next, by the times of steps that it has measured with others.

One measured step calibrates the planner (calibration.py). What further ones take longer than predicted, layouts that
are like them take longer too (measured_layouts.py). So the planner's error shrinks where it is looked at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megacore.config import ResolvedConfig, violations
from megacore.models.outline import outline
from megacore.parallel.host_memory import host_capacity
from megacore.parallel.processors import available_cores
from megacore.plan.calibration import calibrate, wrong_base
from megacore.plan.cluster import Cluster
from megacore.plan.fastest_schedule import typical_cluster
from megacore.plan.measured_layouts import MeasuredLayouts, layout_of, likeness
from megacore.plan.measured_run import Launch, Machine, MeasuredRun, Steps
from megacore.plan.plan_json import layout_flags
from megacore.plan.search import search
from megacore.plan.search_space import Constraints
from megacore.plan.step_time import step_seconds

_ERROR = 0.1  # of the logarithm of a prediction, before any has been compared
_NOISE = 0.02  # of the logarithm of a measured step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Settings of a run with the seconds of a step."""

    config: ResolvedConfig
    seconds: float


def next_layout(
    measured: Sequence[Measured], *, device_name: str, failed: Sequence[ResolvedConfig] = ()
) -> Measured | None:
    """The settings that are expected to be the fastest, with the seconds that are expected, of those that are not
    measured yet; None where none may be faster than the fastest that is. The number of ranks and the global batch stay,
    and with --reproducible every bit.

    Args:
        measured: of one run, at least those that it has begun with.
        device_name: of the first rank's device, as its driver says; `cpu` on a CPU.
        failed: settings that are not to be tried again.
    """
    config = measured[0].config
    if (cluster := _calibrated(measured[0], device_name)) is None:
        return None
    predicted = [step_seconds(one.config, outline(one.config), cluster) for one in measured]
    longer = np.log([one.seconds / seconds for one, seconds in zip(measured, predicted, strict=True)])
    rows = [layout_of(one.config) for one in measured]
    alike = np.array([[likeness(row, other, 0.0) for other in rows] for row in rows])
    weights = np.linalg.solve(alike + _NOISE**2 * np.eye(len(rows)), longer)
    cluster = replace(cluster, layouts=MeasuredLayouts(rows=rows, weights=weights.tolist(), of_shape=0.0))
    # Another size of the microbatch rounds otherwise.
    fixed = {"micro_batch_size": config.training.micro_batch_size} if config.training.reproducible else {}
    found = search(config, cluster, Constraints(world_size=config.parallel.ranks, fixed=fixed))
    known = {layout_flags(one) for one in (*failed, *(one.config for one in measured))}
    error = max(_ERROR, 2 * float(abs(longer).max()))
    limit = min(one.seconds for one in measured) * math.exp(error)
    others = [
        Measured(config=layout.config, seconds=layout.seconds)
        for layout in found.layouts
        if layout.seconds < limit and layout_flags(layout.config) not in known
    ]
    # By turns new degrees come first, of which least is known; and always shapes that are not measured.
    explores, degrees = len(measured) % 2 == 1, [_degrees(one.config) for one in measured]
    others.sort(
        key=lambda one: (
            *(explores and _degrees(one.config) in degrees, layout_of(one.config) in rows),
            *(one.seconds, one.config.parallel.zero_stage),
        )
    )
    return next((one for one in others if not violations(one.config, config.parallel.ranks)), None)


def _degrees(config: ResolvedConfig) -> tuple[int, ...]:
    return *config.parallel.degrees.values(), config.parallel.ep


def _calibrated(first: Measured, device_name: str) -> Cluster | None:
    """The cluster on which the first measured step takes as long as it did; None: its speed is not known."""
    machine, memory = None, host_capacity()
    if device_name == "cpu" and memory is not None:
        machine = Machine(cores=available_cores(), memory_bytes=memory, source="this machine")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    run = MeasuredRun(
        directory=Path(first.config.training.output_dir),
        config=first.config,
        steps=Steps(1, 0, *[first.seconds] * 3),
        launch=Launch(local_ranks=int(local) if local.isdecimal() else None),
    )
    base = typical_cluster(on_cpu=device_name == "cpu", device_name=device_name)
    return None if list(wrong_base(base, run)) else calibrate(run, base, machine).cluster
