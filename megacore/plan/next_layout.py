"""Which settings a run should try next, by the times of steps that it has measured with others; and with which one
should go on that has lost ranks.

One measured step calibrates the planner (calibration.py). What further ones take longer than predicted, layouts that
are like them take longer too (measured_layouts.py). So the planner's error shrinks where it is looked at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config import ResolvedConfig, violations
from megacore.models.outline import outline
from megacore.parallel.host_memory import host_capacity
from megacore.parallel.processors import available_cores
from megacore.plan.calibration import calibrate, wrong_base
from megacore.plan.cluster import Cluster
from megacore.plan.fastest_schedule import typical_cluster
from megacore.plan.measured_run import Launch, Machine, MeasuredRun, Steps
from megacore.plan.plan_json import layout_flags
from megacore.plan.row_fit import Vector, solve, with_constants
from megacore.plan.search import search
from megacore.plan.search_space import Constraints
from megacore.plan.step_time import step_seconds

TUNED = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "zero_stage", "sequence_parallel", "offload_optimizer"),
    *("schedule", "virtual_stages", "pipeline_balance", "pipeline_layout"),
    *("micro_batch_size", "recompute", "recompute_num_layers"),
)
"""Fields of the settings that are chosen."""
# Without which more layouts are valid, each with its value there (ResolvedConfig.with_degrees).
_DROPPED = {
    **{"async_tp": False, "cuda_graphs": False, "distribute_saved_activations": False},
    **{"zero_shard_size": None, "cp_comm": "auto"},
}
_STAYS = ("zero_stage", "offload_optimizer", "micro_batch_size", "recompute", "recompute_num_layers")
# Standard deviations of logarithms: of the constants (row_fit.CONSTANTS), as of a machine that nobody has measured; of
# measured steps; and of what settings take longer that is theirs alone.
_DEVIATIONS, _NOISE, _OWN = np.array([0.3, 0.4, 0.8, 0.8, 1.0, 0.8, 0.05]), 0.02, 0.02
# Variances of the same, of what settings with equal values of these fields have in common.
_ALIKE: Mapping[tuple[str, ...], float] = {
    (): 0.5**2,  # all: the first one may be far from the others
    ("tp", "cp", "ep"): 0.08**2,
    ("tp", "cp", "ep", "pp"): 0.06**2,
    ("micro_batch_size",): 0.06**2,
    ("zero_stage",): 0.04**2,
    ("sequence_parallel", "tp"): 0.04**2,
    ("schedule", "virtual_stages"): 0.04**2,
    ("recompute",): 0.04**2,
    ("pipeline_balance",): 0.02**2,
}
_LEAST = 0.001  # of an expected improvement, for which one looks


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Settings of a run with the seconds of a step."""

    config: ResolvedConfig
    seconds: float


def next_layout(
    measured: Sequence[Measured],
    *,
    device_name: str,
    failed: Sequence[ResolvedConfig] = (),
    fixed: Mapping[str, Any] | None = None,
) -> Measured | None:
    """The settings that are expected to be the fastest, with the seconds that are expected, of those that are not
    measured yet; None where none may be faster than the fastest that is. The number of ranks and the global batch stay,
    and with --reproducible every bit.

    Args:
        measured: of one run, at least those that it has begun with.
        device_name: of the first rank's device, as its driver says; `cpu` on a CPU.
        failed: settings that are not to be tried again.
        fixed: values that stay, by field.
    """
    config = measured[0].config
    if (cluster := _calibrated(measured[0], device_name)) is None:
        return None
    logs = np.log([one.seconds for one in measured])
    configs = [one.config for one in measured]

    def predicted(constants: Vector) -> Vector:
        changed = with_constants(cluster, constants.tolist(), math.exp(logs.min()))
        return np.log([step_seconds(one, outline(one), changed) for one in configs])

    deviations, among = _DEVIATIONS, _covariance(configs, configs)
    found = solve(predicted, logs, deviations, rest=among, noise=_NOISE, most=2 * deviations, rounds=2)
    refit = with_constants(cluster, found.logs.tolist(), math.exp(logs.min()))
    constraints = Constraints(world_size=config.parallel.ranks, fixed=_fixed(config, fixed))
    known = {layout_flags(one) for one in (*failed, *configs)}
    others = [one for one in search(config, refit, constraints).layouts if layout_flags(one.config) not in known]
    if not others:
        return None
    across = _covariance([one.config for one in others], configs)
    expected = np.log([one.seconds for one in others]) + across @ found.weights
    explained = across @ np.linalg.inv(among + _NOISE**2 * np.eye(len(configs)))
    deviation = np.sqrt(np.maximum(_OWN**2 + sum(_ALIKE.values()) - (explained * across).sum(axis=1), _OWN**2))
    improvements = _expected_improvements(logs.min() - expected, deviation)
    for number in np.argsort(-improvements, kind="stable").tolist():
        if improvements[number] < _LEAST:
            return None
        if not violations(others[number].config, config.parallel.ranks):
            return Measured(config=others[number].config, seconds=math.exp(expected[number]))
    return None


def _covariance(some: Sequence[ResolvedConfig], others: Sequence[ResolvedConfig]) -> Vector:
    """Of the logarithm of what settings take longer than predicted: what they have in common, errs alike."""
    total = np.zeros((len(some), len(others)))
    for names, variance in _ALIKE.items():
        rows, columns = ([tuple(map(one.value, names)) for one in configs] for configs in (some, others))
        total += variance * np.array([[row == column for column in columns] for row in rows])
    return total


def _expected_improvements(gain: Vector, deviation: Vector) -> Vector:
    """By how much a value is below the best known on average, where it is that much at all (Jones et al. 1998).
    `gain`: its expected value below the best. `deviation`: of it."""
    scaled = gain / deviation
    below = np.array([math.erfc(-one / math.sqrt(2)) / 2 for one in scaled.tolist()])
    improvements: Vector = gain * below + deviation * np.exp(-(scaled**2) / 2) / math.sqrt(2 * math.pi)
    return improvements


def layouts_of_fewer(
    config: ResolvedConfig, ranks: int, *, device_name: str, fixed: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Layouts, as the values of `TUNED`, for at most so many ranks, by the planner, each faster than the one before.
    What they take beside degrees and schedule stays, as long as it fits into memory; the global batch does, and with
    --reproducible every bit. `device_name`: as of `next_layout`. `fixed`: values that stay anyway, by field."""
    base, memory = typical_cluster(on_cpu=device_name == "cpu", device_name=device_name), host_capacity()
    if device_name == "cpu" and memory is not None:
        device = replace(base.device, memory_bytes=memory, node_ranks=max(available_cores(), ranks))
        base = replace(base, device=device)
    fixed, least, count = _fixed(config, fixed), math.inf, ranks
    plain, kept = config.with_values(_DROPPED), {name: config.value(name) for name in _DROPPED}
    # Without a pipeline a rank has one stage, however many are given.
    shapes = ({}, {"virtual_stages": 1, "pp": 1}) if fixed.get("virtual_stages", 1) > 1 else ({},)
    most = 0  # ranks of a layout that was found; half of them are not faster
    while count > most // 2:
        for more in ({name: config.value(name) for name in _STAYS}, {}):
            searched = (Constraints(world_size=count, fixed={**more, **fixed, **shape}) for shape in shapes)
            found = sorted(chain(*(search(plain, base, one).layouts for one in searched)), key=attrgetter("seconds"))
            tried = ((one.seconds, one.config.with_values(kept).with_degrees({})) for one in found)
            if best := next((one for one in tried if not violations(one[1], count)), None):
                most = most or count
                if best[0] < least:
                    least = best[0]
                    yield {name: best[1].value(name) for name in (*TUNED, *_DROPPED, "schedule_csv")}
                break
        count -= 1


def _fixed(config: ResolvedConfig, fixed: Mapping[str, Any] | None) -> dict[str, Any]:
    """With what must stay for the sake of the numbers: another size of the microbatch rounds otherwise."""
    numbers = {"micro_batch_size": config.training.micro_batch_size} if config.training.reproducible else {}
    return {**numbers, **(fixed or {})}


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
