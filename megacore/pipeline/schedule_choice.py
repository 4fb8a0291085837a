"""What is left open in a configuration and settled at launch: the schedule of --schedule auto, and stages that fit.
Which schedule is fastest the planner predicts (megacore/plan/fastest_schedule.py); which fits is asked of all ranks."""

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


class ScheduleChoice(NamedTuple):
    """Values of `--schedule` and `--virtual-stages`."""

    name: ScheduleName
    virtual_stages: int = 1

    def of(self, config: ResolvedConfig) -> ResolvedConfig:
        parallel = config.parallel.resolved_as(ChosenSchedule, schedule=self.name, virtual_stages=self.virtual_stages)
        return dataclasses.replace(config, parallel=parallel)


ONE_FORWARD_ONE_BACKWARD = ScheduleChoice("1f1b")
"""The schedule that needs the least memory: what is left where no other is predicted to be faster, or fits."""


def is_open(config: ResolvedConfig) -> bool:
    """Whether there is a schedule to choose."""
    parallel = config.parallel
    return parallel.schedule == AUTO_SCHEDULE and parallel.pp > 1 and parallel.schedule_csv is None


def is_auto(config: ResolvedConfig) -> bool:
    """Whether --schedule auto chooses, or has chosen, the schedule."""
    parallel = config.parallel
    is_chosen = isinstance(parallel, ChosenSchedule) or parallel.schedule == AUTO_SCHEDULE
    return is_chosen and parallel.schedule_csv is None


def choose_schedule(
    config: ResolvedConfig, choices: Sequence[ScheduleChoice], fits: Callable[[ResolvedConfig], bool]
) -> ResolvedConfig:
    """The configuration with the first schedule whose every rank `fits` into memory, or the last, which is not asked
    about."""
    *faster, last = (choice.of(config) for choice in choices)
    return next((candidate for candidate in faster if fits(candidate)), last)


def with_stages_that_fit(config: ResolvedConfig, fits: Callable[[ResolvedConfig], bool]) -> ResolvedConfig:
    """The configuration with stages balanced by parameters, where those balanced by time do not fit and these do.
    `fits`: whether every rank has the memory."""
    parallel = config.parallel
    is_open = parallel.pipeline_balance == "time" and parallel.pipeline_layout is None
    if parallel.pp == 1 or not is_open or fits(config):
        return config
    kind = ChosenScheduleThatFits if isinstance(parallel, ChosenSchedule) else StagesThatFit
    by_parameters = dataclasses.replace(config, parallel=parallel.resolved_as(kind, pipeline_balance="parameters"))
    return by_parameters if fits(by_parameters) else config
