"""The section of what watches a run: the watchdog (megacore/watch/), and the checks for silent corruption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megacore.config.fields import Flag, Range, Section


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section):
    """Finds hangs and corruption (docs/guides/watching.md)."""

    hang_timeout_minutes: Annotated[float, Range(0, 10080)] = 5.0
    """Minutes without progress within a step after which the watchdog reports the run as hung and ends it. If ten
    median steps take longer, that is the limit. Saves, evaluations, the first step and index builds may take a
    multiple of these minutes (docs/guides/watching.md). 0: no watchdog."""
    check_replicas_interval: Annotated[int, Range(0), Flag(("--check-weight-hash-across-dp-replicas-interval",))] = 100
    """Compares replicated weights, master weights and optimizer state bit by bit between ranks, at this
    interval of steps and before each save. The run stops with status 3 if they differ. 0: no checks."""
    replay_interval: Annotated[int, Range(0)] = 0
    """Computes one microbatch a second time on the same rank, at this interval of steps, and compares its loss and
    gradients bit by bit. The run stops with status 3 if they differ. On accelerators it needs --reproducible. 0: no
    replays."""
