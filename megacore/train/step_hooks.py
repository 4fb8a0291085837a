"""What takes part in a train step besides model and optimizer: `TrainStep` calls the methods, and knows no hook by
name. A callback (callbacks.py) watches a run; a hook changes what a step computes or leaves in a checkpoint. A feature
joins with a line of `step_hooks` in step.py. Every rank calls its hooks in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megacore.pipeline.runtime import LossWeight

if TYPE_CHECKING:
    from megacore.optim.update import Outcome
    from megacore.train.step import TrainStep

ComputesGradients = Callable[[Sequence[Any], LossWeight], Tensor]
"""(microbatches of this replica, factor of the loss) -> summed loss; gradients are left with data parallelism."""


class StepHook:
    """The moments of a step. They do nothing here: override those of interest."""

    def before_gradients(self, steps: TrainStep, microbatches: Sequence[Any]) -> None:
        """The next step is about to be computed; gradients that are computed here are dropped."""

    def begin_step(self, step: int, loss_scale: float) -> None:
        """The forwards of step number `step` follow, whose loss is multiplied by `loss_scale`."""

    def computes(self, step: int) -> ComputesGradients | None:
        """What computes the gradients of a step in place of the pipeline's runtime; the first hook with an answer
        does."""
        return None

    def after_update(self, steps: TrainStep, outcome: Outcome) -> None:
        """The weights are updated, or `outcome.skipped` says why not."""

    def figures(self) -> Mapping[str, float | None]:
        """Of the last step, by their keys in metrics.jsonl, equal on every rank; all ranks call this together."""
        return {}

    def series(self) -> Mapping[str, list[float]]:
        """Numbers that a checkpoint keeps, by name."""
        return {}

    def load_series(self, series: Mapping[str, Sequence[float]]) -> None:
        """Continue from a checkpoint, which may have none of them."""

    def buffers(self) -> Mapping[str, Tensor]:
        """Tensors that a checkpoint keeps, and fills when it is loaded, by global name."""
        return {}
