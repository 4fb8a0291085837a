"""The section of what watches a run: the watchdog (megacore/watch/), and the checks for silent corruption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megacore.config.fields import Flag, Range, Section


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section):
    """Checks for hangs and for silent corruption (docs/watching.md)."""

    hang_timeout_minutes: Annotated[float, Range(0, 10080)] = 5.0
    """Minutes that a run may stand still in a step before it is reported and ended as hung. A run whose steps are long
    has ten times the median step instead. Saves, evaluations, the first step and index builds have a multiple of it
    (docs/watching.md). 0: no watchdog."""
    check_replicas_interval: Annotated[int, Range(0), Flag(("--check-weight-hash-across-dp-replicas-interval",))] = 100
    """Compares weights, master weights and optimizer state, bit by bit, between the ranks that hold copies of them,
    every so many steps and before each save. A run whose copies differ stops with status 3. 0: no checks."""
    replay_interval: Annotated[int, Range(0)] = 0
    """Computes one microbatch a second time, every so many steps, and compares its loss and gradients, bit by bit, on
    the same rank. A run with a difference stops with status 3. On accelerators it needs --reproducible. 0: no
    replays."""
