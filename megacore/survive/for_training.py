"""What `--survive` does for a run (megacore/train/survival.py)."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megacore.checkpoint.directory import published
from megacore.config import ResolvedConfig
from megacore.config.checkpoint import AUTO
from megacore.config.nodes import has_several_nodes
from megacore.errors import ConfigError
from megacore.remote import location
from megacore.train.starting import set_torch_defaults
from megacore.train.survival import Survival

if TYPE_CHECKING:
    from megacore.survive.meeting import Plan
    from megacore.train.callbacks import Callback
    from megacore.train.trainer import Trainer

C = TypeVar("C", bound=ResolvedConfig)


class _Survival(Survival):
    def __init__(self) -> None:
        # Of a child: what it is to do, in which generation, and where the memory of its node is.
        self._plan: Plan | None = None
        self._generation, self._memory = 0, Path()

    def check(self, config: ResolvedConfig) -> None:
        if not config.watch.survive:
            return
        problems = []
        if sys.platform != "linux":
            problems.append(f"--survive needs Linux, and this is {sys.platform}: leave it out")
        if has_several_nodes():
            problems.append("--survive joins the ranks of one node so far: leave it out, or use --nnodes 1 of torchrun")
        if problems:
            raise ConfigError(problems)

    def keep(self, config: ResolvedConfig, argv: Sequence[str], train: Callable[[list[str]], int]) -> int | None:
        if not config.watch.survive or self._plan is not None:
            return None
        begun = time.monotonic()
        set_torch_defaults()
        # A process that has asked the driver cannot be forked; this makes torch ask its library instead.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        keeper_module = importlib.import_module("megacore.survive.keeper")

        def trained(plan: Plan, generation: int) -> int:
            self._plan, self._generation, self._memory = plan, generation, keeper.memory.path
            flags = [*argv, *plan.flags]
            if (minutes := config.checkpoint.exit_duration_minutes) is not None:
                left = max(minutes - (time.monotonic() - begun) / 60, 1e-3)  # of the time that the job has
                flags += ["--exit-duration-minutes", f"{left:.3f}"]
            return train(flags)

        keeper = keeper_module.Keeper(config, trained)
        status: int = keeper.run()
        return status

    def continued(self, config: C) -> C:
        if self._plan is None or not self._generation:
            return config
        load = self._plan.load
        if load is None:
            if not published(location(config.checkpoint_dir)):
                return config
            load = AUTO
        checkpoint = dataclasses.replace(config.checkpoint, load=load)
        return dataclasses.replace(
            config, checkpoint=checkpoint, start=dataclasses.replace(config.start, load_optim=True)
        )

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        if self._plan is None:
            return []
        writer = importlib.import_module("megacore.survive.writer")
        interval = trainer.config.watch.survive_interval
        state: Callback = writer.StateInMemory(trainer, self._memory, self._generation, interval)
        recovery: Callback = writer.Recovery(self._plan)
        return [state, recovery]


SURVIVAL = _Survival()
