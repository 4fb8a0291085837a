"""The section of the spike guard (megacore/optim/spikes.py, megacore/train/rollback.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Range, Section
from megacore.config.rules import Needs


@dataclass(frozen=True, kw_only=True)
class SpikeConfig(Section):
    """When the loss jumps (docs/guides/spikes.md)."""

    on_spike: Literal["none", "warn", "skip", "rollback"] = "warn"
    """What to do when the loss or the gradient norm spikes. warn: a warning. skip: the step leaves the weights
    unchanged. rollback: back to the last checkpoint, without the data since then."""
    spike_threshold: Annotated[float, Range(above=0), Needs(on_spike=("warn", "skip", "rollback"))] = 10.0
    """A spike is a value above median + this x robust deviation of the last accepted values (docs/guides/spikes.md)."""
    spike_window: Annotated[int, Range(4, 100_000), Needs(on_spike=("warn", "skip", "rollback"))] = 128
    """Accepted values for the median and the deviation. The guard needs half as many, and the end of the warm-up."""
    spike_skip_batches: Annotated[int, Range(0, 1_000_000), Needs(on_spike="rollback")] = 10
    """Global batches after the spike that rollback skips too."""
    max_rollbacks: Annotated[int, Range(1, 1000), Needs(on_spike="rollback")] = 3
    """Rollbacks after which the next spike stops the run."""
