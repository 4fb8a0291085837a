"""Rollbacks (`--on-spike rollback`): which there were, which samples they skip, and when the run stops instead.

A rollback loads the run's last checkpoint and moves the position in the data behind the samples that were seen since,
and some more (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1). The run then saves at once: its newest checkpoint
has the new position, so that a job that is started again, on any layout, skips the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from megacore.config import ResolvedConfig
from megacore.errors import TrainingDiverged

_SERIES = "rollbacks"


@dataclass(frozen=True)
class Rollback:
    """A return to a checkpoint.

    Attributes:
        from_step: the step that spiked.
        to_step: that of the checkpoint.
        first_sample: the first that is skipped.
        stop_sample: the first that is not skipped any more.
    """

    from_step: int
    to_step: int
    first_sample: int
    stop_sample: int

    def __str__(self) -> str:
        return (
            f"step {self.from_step} -> step {self.to_step}, samples {self.first_sample:,} to {self.stop_sample - 1:,} "
            "skipped"
        )


class Rollbacks:
    """The rollbacks of a run, which its checkpoints keep.

    Args:
        config: resolved.

    Attributes:
        done: so far, those of earlier starts included.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._options, self._batch = config.spikes, config.training.global_batch_size
        self.done: list[Rollback] = []

    def figures(self) -> dict[str, float]:
        """Their number, for the record of a step."""
        return {"train/rollbacks": len(self.done)} if self._options.on_spike == "rollback" else {}

    def add(self, spike: str, *, from_step: int, to_step: int, first_sample: int, stop_sample: int) -> Rollback:
        """Decide on a rollback.

        Args:
            spike: what happened, for the message.
            from_step: the step that spiked.
            to_step: that of the last checkpoint.
            first_sample: the position in the data of that checkpoint.
            stop_sample: the position after the step that spiked.

        Raises:
            TrainingDiverged: there were as many rollbacks as may be; or the run is not past the step whose spike caused
                the last one, whichever checkpoint is the last by now.
        """
        happened, earlier = f"step {from_step}: {spike}", "; ".join(map(str, self.done))
        if self.done and from_step <= self.done[-1].from_step:
            raise TrainingDiverged(
                f"{happened}: a spike again after the rollback to step {self.done[-1].to_step}, on other samples "
                f"({earlier}). Either the weights diverge: resume from an earlier checkpoint with a smaller --lr, or "
                "with --clip-grad-adaptive. Or more of the data is bad: use a larger --spike-skip-batches than "
                f"{self._options.spike_skip_batches}"
            )
        if len(self.done) >= self._options.max_rollbacks:
            raise TrainingDiverged(
                f"{happened}: there were {len(self.done)} rollbacks already (--max-rollbacks "
                f"{self._options.max_rollbacks}): {earlier}. Look at these samples; use a larger --max-rollbacks to "
                "continue, or a smaller --lr"
            )
        further = self._options.spike_skip_batches * self._batch
        self.done.append(Rollback(from_step, to_step, first_sample, stop_sample + further))
        return self.done[-1]

    def series(self) -> dict[str, list[float]]:
        """The rollbacks, for a checkpoint; nothing where there were none."""
        return {_SERIES: [float(number) for each in self.done for number in astuple(each)]} if self.done else {}

    def load(self, series: Mapping[str, Sequence[float]]) -> None:
        """Continue from a checkpoint."""
        self.done = rollbacks_of(series)


def rollbacks_of(series: Mapping[str, Sequence[float]]) -> list[Rollback]:
    """The rollbacks that the series of a checkpoint tell of."""
    numbers = [int(number) for number in series.get(_SERIES, ())]
    return [Rollback(*numbers[first : first + 4]) for first in range(0, len(numbers) - 3, 4)]
