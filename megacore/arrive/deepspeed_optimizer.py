"""What `megacore.initialize` gives a program beside its engine, which does the work: an optimizer and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megacore.config.fields import LARGEST_INT
from megacore.errors import UserError
from megacore.optim.lr_schedules import learning_rate

if TYPE_CHECKING:
    from megacore.arrive.deepspeed_engine import Engine


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for the engine's optimizer: its learning rate is that of the next step, and may be set."""

    def __init__(self, engine: Engine, lr: float) -> None:
        config = engine.pipeline.config.optimizer
        parameters = [p for p in engine.pipeline.model.parameters.values() if p.requires_grad]
        super().__init__(parameters, {"lr": lr, "weight_decay": config.weight_decay})
        self._engine = engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not for programs: engine.step() updates the weights. Raises UserError always."""
        raise UserError("optimizer.step() is called: call engine.step(), which clips gradients and updates the weights")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: every step of the engine drops the gradients of the one before."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: `engine.save_checkpoint` saves the state of the optimizer."""
        return {}


class Schedule:
    """The schedule of the configuration, as programs look at it; `engine.step` moves it on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """The learning rate of the next step."""
        step, config = self._engine.global_steps + 1, self._engine.pipeline.config.optimizer
        return [learning_rate(step, config, train_iters=LARGEST_INT)]

    def get_lr(self) -> list[float]:
        return self.get_last_lr()

    def step(self) -> None:
        """Not for programs. Raises UserError always."""
        raise UserError("scheduler.step() is called: leave it out, because engine.step() moves the schedule on")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the schedule is a function of the engine's step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""
