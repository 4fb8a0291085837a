"""What a run asks the planner before it starts: whether it fits into memory, and which schedule is fastest. The
planner, `megacore.plan`, is optional: a tree without it trains as `Planner` says. This module alone knows where it is,
and loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple, cast

from megacore import has_ring
from megacore.config import ResolvedConfig
from megacore.models.outline import ModelLayer
from megacore.parallel.host_memory import AvailableMemory
from megacore.pipeline.schedule_choice import ONE_FORWARD_ONE_BACKWARD, ScheduleChoice


class MemoryVerdict(NamedTuple):
    """Why a rank is refused, or a warning for it."""

    problem: str | None = None
    warning: str | None = None

    def of_rank(self, where: str) -> MemoryVerdict:
        return MemoryVerdict(self.problem and self.problem + where, self.warning and self.warning + where)


class PredictedMemory(NamedTuple):
    """Bytes that are expected."""

    state: dict[str, float]  # of the fullest rank, by kind
    peak: float | None  # of this rank; None: not known


class Planner:
    """What a run asks, with the answers of a tree without a planner: everything fits, nothing is predicted."""

    def check_memory(self, config: ResolvedConfig) -> None:
        """Refuse a run on a machine without an accelerator whose host memory it cannot fit into; before torch is
        loaded. Raises ConfigError with what it needs, and what would fit."""

    def device_verdict(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], stage: int, memory: AvailableMemory | None
    ) -> MemoryVerdict:
        """Whether a rank fits into its accelerator's memory, and what it offloads into that of its host. `layers`: the
        whole model. `stage`: the rank's number in its pipeline. `memory`: of the accelerator; None: not known."""
        return MemoryVerdict()

    def host_verdict(self, config: ResolvedConfig, layers: Sequence[ModelLayer]) -> MemoryVerdict:
        """Whether the ranks of this machine, which compute on its CPU, fit into its memory."""
        return MemoryVerdict()

    def predicted_memory(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], stage: int, *, on_cpu: bool
    ) -> PredictedMemory:
        """What ranks are expected to hold; arguments as for `device_verdict`."""
        return PredictedMemory({}, None)

    def schedules_by_time(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], *, on_cpu: bool, device_name: str = ""
    ) -> list[ScheduleChoice]:
        """The schedules that are predicted to be faster than 1F1B, the fastest first, and last 1F1B. `on_cpu`: whether
        the ranks compute on a CPU. `device_name`: of the accelerator, as its driver says."""
        return [ONE_FORWARD_ONE_BACKWARD]


def planner() -> Planner:
    """That of `megacore.plan`, where it is installed."""
    if not has_ring("plan"):
        return Planner()
    return cast(Planner, importlib.import_module("megacore.plan.for_training").PLANNER)


def check_memory(config: ResolvedConfig) -> None:
    """`Planner.check_memory`, as a check of the command line."""
    planner().check_memory(config)
