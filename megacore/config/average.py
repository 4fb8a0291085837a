"""The section of the moving average of the weights (megacore/optim/weight_average.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megacore.config.fields import Flag, Range, Section
from megacore.config.optimizers import StateKind

EMA = StateKind(name="ema", first="weights")
"""The average, which is kept beside the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class AverageConfig(Section):
    """An exponential moving average of the weights."""

    ema_decay: Annotated[float | None, Range(above=0, below=1), Flag(example=0.999)] = None
    """Keeps an exponential moving average of the weights, which each update changes to D x average + (1 - D) x weights
    (docs/reference/optimizers.md). Default: none."""
    eval_ema: bool = False
    """Evaluates the average of --ema-decay instead of the weights."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        """What is kept beside the optimizer's state."""
        return () if self.ema_decay is None else (EMA,)

    @property
    def bytes_per_parameter(self) -> float:
        return sum(kind.bytes_per_element for kind in self.state)
