"""The sections of what watches a run: the watchdog (megacore/watch/), the checks for silent corruption, and the guard
against spikes (megacore/optim/spikes.py, megacore/train/rollback.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.messages import counted
from megacore.config.rules import Needs


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section):
    """Finds hangs and corruption (docs/guides/watching.md)."""

    hang_timeout_minutes: Annotated[float, Range(0, 10080)] = 5.0
    """Minutes without progress in a step, at least ten median steps, after which the watchdog ends the run as hung.
    Saves, evaluations and the first step may take longer (docs/guides/watching.md). 0: off."""
    survive: bool = False
    """Continues within seconds after ranks die, hang or return, on those that are there, from a copy of the state in
    memory (docs/guides/failures.md)."""
    survive_interval: Annotated[int, Range(1)] = 1
    """Steps between copies of the state in memory."""
    spare_ranks: Annotated[int, Range(0)] = 0
    """Started processes, the last ones, that train nothing until they take the place of a lost rank."""
    retune: Annotated[bool, Needs(survive=True)] = False
    """Tries other layouts, micro-batches and recomputation while it trains, and keeps the fastest. Values of flags
    stay, except degrees (docs/guides/failures.md)."""
    retune_after: Annotated[int, Range(1)] = 10
    """Steps measured with each, after one that is not."""
    retune_every: Annotated[int, Range(1)] = 100
    """Steps between looks whether the speed has changed."""
    retune_settings: Annotated[int, Range(1)] = 8
    """Others that are tried, at most."""
    check_replicas_interval: Annotated[int, Range(0), Flag(("--check-weight-hash-across-dp-replicas-interval",))] = 100
    """Steps between bitwise comparisons of replicated weights and optimizer state, also made before each save. A
    difference stops the run with status 3. 0: off."""
    replay_interval: Annotated[int, Range(0)] = 0
    """Steps between replays of a microbatch, whose loss and gradients must be bitwise the same. A difference stops the
    run with status 3. On accelerators it needs --reproducible. 0: off."""
    ledger: bool = False
    """Writes OUTPUT_DIR/ledger.jsonl: a line for each step, chained by hashes, which tools/audit.py checks
    (docs/guides/audit.md)."""
    ledger_interval: Annotated[int, Range(1)] = 20
    """Steps between hashes of weights and optimizer state in the ledger, which also has those of each save."""

    @property
    def spares(self) -> int:
        """Processes that the launcher starts beside the ranks that train."""
        return max(self.spare_ranks, 0) if self.survive else 0

    @property
    def beside(self) -> str:
        """The same in words, after a number of ranks."""
        return f" beside {counted(self.spares, 'spare')}" if self.spares else ""


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
