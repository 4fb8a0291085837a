"""Rollbacks (`--on-spike rollback`): which there were, which samples they skip, and when the run stops instead. A
rollback loads the run's last checkpoint and moves the position in the data behind the samples that were seen since, and
some more (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1). The run then saves at once: its newest checkpoint has
the new position, so that a job that is started again, on any layout, skips the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from megacore.checkpoint import Manifest
from megacore.config import ResolvedConfig
from megacore.errors import TrainingDiverged

_SERIES = "rollbacks"


@dataclass(frozen=True)
class Rollback:
    """A return to a checkpoint."""

    from_step: int  # the step that spiked
    to_step: int  # that of the checkpoint
    first_sample: int  # the first that is skipped
    stop_sample: int  # the first that is not skipped any more

    def __str__(self) -> str:
        return (
            f"step {self.from_step} -> step {self.to_step}, samples {self.first_sample:,} to {self.stop_sample - 1:,} "
            "skipped"
        )


class Rollbacks:
    """The rollbacks of a run, which its checkpoints keep."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._options, self._batch = config.spikes, config.training.global_batch_size
        self.done: list[Rollback] = []  # so far, those of earlier starts included

    def figures(self) -> dict[str, float]:
        return {"train/rollbacks": len(self.done)} if self._options.on_spike == "rollback" else {}

    def add(self, spike: str, *, from_step: int, to_step: int, first_sample: int, stop_sample: int) -> Rollback:
        """Decide on a rollback. Raises TrainingDiverged where there were as many rollbacks as may be; or the run is not
        past the step whose spike caused the last one, whichever checkpoint is the last by now.

        Args:
            spike: what happened, for the message.
            to_step: that of the last checkpoint.
            first_sample: the position in the data of that checkpoint.
            stop_sample: the position after the step that spiked.
        """
        happened, earlier = f"step {from_step}: {spike}", "; ".join(map(str, self.done))
        if self.done and from_step <= self.done[-1].from_step:
            raise TrainingDiverged(
                f"{happened}: a spike again after the rollback to step {self.done[-1].to_step}, on other samples "
                f"({earlier}). Either the weights diverge: resume from an earlier checkpoint with a smaller --lr, or "
                f"with --clip-grad-adaptive. Or more of the data is bad: {self._way_to_skip_more(to_step)}"
            )
        if len(self.done) >= self._options.max_rollbacks:
            raise TrainingDiverged(
                f"{happened}: there were {len(self.done)} rollbacks already (--on-spike "
                f"max-rollbacks={self._options.max_rollbacks}): {earlier}. Look at these samples; use a larger "
                "--on-spike max-rollbacks to continue, or a smaller --lr"
            )
        further = self._options.spike_skip_batches * self._batch
        self.done.append(Rollback(from_step, to_step, first_sample, stop_sample + further))
        return self.done[-1]

    def _way_to_skip_more(self, newest_step: int) -> str:
        """What to start, for the message. `extend` needs the checkpoint that the rollback saved."""
        last, skip = self.done[-1], f"a larger --on-spike skip-batches than {self._options.spike_skip_batches}"
        if newest_step == last.to_step:
            return f"resume with --load auto and {skip}"
        return f"resume from the checkpoint of step {last.to_step}, in a new --output-dir, with {skip}"

    def series(self) -> dict[str, list[float]]:
        return {_SERIES: [float(number) for each in self.done for number in astuple(each)]} if self.done else {}

    def load(self, series: Mapping[str, Sequence[float]]) -> None:
        self.done = rollbacks_of(series)

    def extend(self, manifest: Manifest) -> Rollback | None:
        """Apply a larger --on-spike skip-batches to the last rollback, if the run continues right after it. `manifest`:
        of the checkpoint that the run continues from. Returns the rollback with its new range; None where nothing
        changes."""
        if self._options.on_spike != "rollback" or not self.done:
            return None
        last, there = self.done[-1], manifest.settings
        batches, batch = there.get("spike_skip_batches"), there.get("global_batch_size")
        is_next = (manifest.step, manifest.consumed_samples) == (last.to_step, last.stop_sample)
        if not (is_next and type(batches) is int and type(batch) is int):
            return None
        stop_sample = last.stop_sample - batches * batch + self._options.spike_skip_batches * self._batch
        if stop_sample <= last.stop_sample:
            return None
        self.done[-1] = replace(last, stop_sample=stop_sample)
        return self.done[-1]


def rollbacks_of(series: Mapping[str, Sequence[float]]) -> list[Rollback]:
    """The rollbacks that the series of a checkpoint tell of."""
    numbers = [int(number) for number in series.get(_SERIES, ())]
    return [Rollback(*numbers[first : first + 4]) for first in range(0, len(numbers) - 3, 4)]
