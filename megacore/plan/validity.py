"""Which of the layouts that a search tries are valid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megacore.config import ResolvedConfig, violations
from megacore.config.dimensions import ranks_of_role
from megacore.plan.search_space import Choice, with_choice


class Validity:
    """Whether layouts are valid. The rules that bind them are about one of four: the degrees; the microbatch, for so
    many replicas; the schedule, for so many stages; what a ZeRO stage and recomputation go with. Each is validated
    once, with the rest as in the run that the search begins from, which is valid: no rule may bind a ZeRO stage or
    recomputation of that run to degrees or a schedule that other layouts do not have."""

    def __init__(self, config: ResolvedConfig, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._known: dict[tuple[object, ...], bool] = {}

    def __call__(self, choice: Choice) -> bool:
        parallel, training = choice.parallel, choice.training
        degrees = (parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.expert_split)
        shape = (*degrees, parallel.sequence_parallel)
        batch = (ranks_of_role("batch", parallel), training.micro_batch_size)
        schedule = (parallel.pp, parallel.schedule, parallel.virtual_stages)
        memory = (parallel.zero_stage, training.recompute, parallel.offload_optimizer)
        savings = (*memory, parallel.tp > 1, parallel.pp > 1, parallel.schedule)

        plain = {"schedule": "1f1b", "virtual_stages": 1}
        return (
            self._is_valid(shape, lambda: self._plain(choice, plain, micro_batch_size=1))
            and self._is_valid(batch, lambda: self._plain(choice, plain))
            and self._is_valid(schedule, lambda: self._plain(choice, {}))
            and self._is_valid(savings, lambda: choice)
        )

    def _is_valid(self, key: tuple[object, ...], choice: Callable[[], Choice]) -> bool:
        if key not in self._known:
            self._known[key] = not violations(with_choice(self._config, choice()), self._world_size)
        return self._known[key]

    def _plain(self, choice: Choice, of_schedule: Mapping[str, Any], **of_training: Any) -> Choice:
        """The choice with what saves memory as in the run that the search begins from."""
        saving = {name: getattr(self._config.parallel, name) for name in ("zero_stage", "offload_optimizer")}
        start = self._config.training
        recomputed: dict[str, Any] = {
            "recompute": start.recompute,
            "recompute_num_layers": start.recompute_num_layers,
        }
        return Choice(
            parallel=dataclasses.replace(choice.parallel, **saving, **of_schedule),
            training=dataclasses.replace(choice.training, **recomputed, **of_training),
        )
