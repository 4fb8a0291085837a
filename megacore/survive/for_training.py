"""What `--survive` does for a run (megacore/train/survival.py)."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megacore import has_ring
from megacore.config import ResolvedConfig
from megacore.config.dimensions import degree_fields
from megacore.config.flags import read_flags
from megacore.errors import ConfigError
from megacore.survive.copies import remove_older
from megacore.train.starting import set_torch_defaults
from megacore.train.survival import Survival

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.survive.keeper import Keeper
    from megacore.survive.meeting import Plan
    from megacore.train.callbacks import Callback
    from megacore.train.trainer import Trainer

C = TypeVar("C", bound=ResolvedConfig)


class _Survival(Survival):
    def __init__(self) -> None:
        # Of a child: what it is to do, in which generation, and what has started it.
        self._plan: Plan | None = None
        self._generation = 0
        self._keeper: Keeper | None = None

    def check(self, config: ResolvedConfig) -> None:
        if not config.watch.survive:
            return
        if sys.platform != "linux":
            raise ConfigError([f"--survive needs Linux, and this is {sys.platform}: leave it out"])
        if config.watch.retune and not has_ring("plan"):
            raise ConfigError(["--retune needs megacore/plan, which is not installed: leave it out"])

    def keep(self, config: C, train: Callable[[C], int], read_data: Callable[[C], object]) -> int | None:
        if not config.watch.survive:
            return None
        begun = time.monotonic()
        set_torch_defaults()
        # A process that has asked the driver cannot be forked; this makes torch ask its library instead.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        keeper_module = importlib.import_module("megacore.survive.keeper")

        def trained(plan: Plan, generation: int) -> int:
            self._plan, self._generation, self._keeper = plan, generation, keeper
            values: dict[str, Any] = dict(plan.values)
            if (minutes := config.checkpoint.exit_duration_minutes) is not None:
                left = max(minutes - (time.monotonic() - begun) / 60, 1e-3)  # of the time that the job has
                values["exit_duration_minutes"] = left
            return train(config.with_values(values))

        # What flags give stays, but for degrees, with which a run only begins.
        typed = read_flags(sys.argv[1:], type(config)).values
        degrees = {*degree_fields(), "ep", "etp"}
        own = {**vars(config.training), **vars(config.parallel)}
        fixed = {name: value for name, value in typed.items() if name in own.keys() - degrees and own[name] == value}
        keeper: Keeper = keeper_module.Keeper(config, trained, fixed, partial(read_data, config))
        status: int = keeper.run()
        return status

    @property
    def recovers(self) -> bool:
        return self._plan is not None and bool(self._plan.cause)

    def continued(self, config: C, mesh: Mesh) -> C:
        if (plan := self._plan) is None or (keeper := self._keeper) is None or not (plan.load or plan.slot):
            return config
        load = plan.load
        if plan.slot:
            slot = keeper.memory.path / plan.slot
            importlib.import_module("megacore.survive.peers").complete(
                slot, plan.parts, plan.nodes, mesh, config.parallel
            )
            load = str(slot)
        checkpoint = dataclasses.replace(config.checkpoint, load=load)
        return dataclasses.replace(
            config, checkpoint=checkpoint, start=dataclasses.replace(config.start, load_optim=True)
        )

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        if (plan := self._plan) is None or (keeper := self._keeper) is None:
            return []
        writer = importlib.import_module("megacore.survive.writer")
        interval, memory = trainer.config.watch.survive_interval, keeper.memory.path
        if plan.nodes.index(plan.nodes[trainer.mesh.world.rank]) == trainer.mesh.world.rank:
            remove_older(memory, self._generation, kept=plan.slot)
        state = writer.StateInMemory(trainer, memory, self._generation, interval, plan.nodes)
        found: list[Callback] = [state, writer.Recovery(plan, lambda: keeper.signal)]
        if trainer.config.watch.retune:
            found.append(
                importlib.import_module("megacore.survive.retune").Retune(trainer, plan, state, memory, keeper.fixed)
            )
        return found


SURVIVAL = _Survival()
