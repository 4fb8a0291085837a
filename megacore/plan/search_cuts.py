"""How the layouts of a search cut the model into stages: each cut is made once for all layouts that have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.pipeline.partition import stage_ranges
from megacore.plan.cut import Cut, Parts
from megacore.plan.search_space import Choice, Constraints, with_choice

Balance = Literal["time", "parameters", "flops", "uniform"]
Stages = tuple[range, ...]


class Cuts:
    """How layouts cut the model into stages, of which many have the same.

    Args:
        config: of any layout.
        constraints: what a layout may be.
    """

    def __init__(self, config: ResolvedConfig, constraints: Constraints) -> None:
        self._config = config
        self._tries_time = "pipeline_balance" not in constraints.fixed
        self._parts: dict[Hashable, Parts] = {}
        self._stages: dict[Hashable, Stages] = {}
        self._alike: dict[Stages, Stages] = {}  # equal ones are one object
        self._cuts: dict[Hashable, Cut] = {}

    def parts(self, config: ResolvedConfig) -> Parts:
        """The parts into which these degrees may cut the model."""
        key = config.parallel.tp, config.parallel.ep, config.parallel.expert_split
        if key not in self._parts:
            self._parts[key] = Parts(config, outline(config))
        return self._parts[key]

    def of(self, config: ResolvedConfig) -> Cut:
        """The cut of a layout."""
        parts = self.parts(config)
        stages = self._stages_of(Choice(parallel=config.parallel, training=config.training))
        key = id(parts), config.parallel.pp, id(stages)
        if key not in self._cuts:
            self._cuts[key] = Cut(config, parts, stages)
        return self._cuts[key]

    def is_as_by_time(self, choice: Choice) -> bool:
        """Whether balancing by time, which is tried too, cuts the model in the same way."""
        if choice.parallel.pipeline_balance == "time" or not self._tries_time:
            return False
        return self._stages_of(choice) is self._stages_of(choice, "time")

    def _stages_of(self, choice: Choice, balance: Balance | None = None) -> Stages:
        parallel, training = choice.parallel, choice.training
        balance = balance or parallel.pipeline_balance
        key: tuple[Hashable, ...] = balance, parallel.pp * parallel.virtual_stages
        if balance == "time":  # that of layers
            key += parallel.tp, parallel.cp, parallel.sequence_parallel, training.micro_batch_size, training.recompute
        if key not in self._stages:
            parallel = dataclasses.replace(parallel, pipeline_balance=balance)
            balanced = with_choice(self._config, Choice(parallel=parallel, training=training))
            stages = tuple(stage_ranges(self.parts(balanced).layers, balanced))
            self._stages[key] = self._alike.setdefault(stages, stages)
        return self._stages[key]
