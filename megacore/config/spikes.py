"""The section of the spike guard (megacore/optim/spikes.py, megacore/train/rollback.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Range, Section, use


@dataclass(frozen=True, kw_only=True)
class SpikeConfig(Section):
    """When the loss jumps (docs/guides/spikes.md)."""

    on_spike: Literal["none", "warn", "skip", "rollback"] = "warn"
    """What to do when the loss or the gradient norm of a step spikes. none: nothing. warn: a warning. skip: the step
    leaves the weights unchanged. rollback: the run returns to its last checkpoint and skips the data since then."""
    spike_threshold: Annotated[float, Range(above=0)] = 10.0
    """A spike is a loss or gradient norm above median + this x robust deviation of the last accepted values. The robust
    deviation is 1.4826 x the median absolute deviation, and at least 1% of the median loss or 10% of the median
    norm."""
    spike_window: Annotated[int, Range(4, 100_000)] = 128
    """Number of accepted values for the median and the deviation. The guard becomes active when half as many exist
    and --lr-warmup-iters is over."""
    spike_skip_batches: Annotated[int, Range(0, 1_000_000)] = 10
    """Number of global batches after the spike that --on-spike rollback skips too."""
    max_rollbacks: Annotated[int, Range(1, 1000)] = 3
    """Number of rollbacks after which the next spike stops the run."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if "on_spike" in wrong:
            return
        given = f"--on-spike {self.on_spike}"
        if self.on_spike == "none":
            yield from self.without_effect(
                ("spike_threshold", "spike_window"), wrong, given, "--on-spike warn, skip or rollback"
            )
        if self.on_spike != "rollback":
            yield from self.without_effect(
                ("spike_skip_batches", "max_rollbacks"), wrong, given, use("on_spike", "rollback")
            )
