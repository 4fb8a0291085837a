"""The section of the watchdog (megacore/watch/)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megacore.config.fields import Range, Section


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section):
    """The watchdog, which ends a run that hangs and names the rank that holds it up (docs/watching.md)."""

    hang_timeout_minutes: Annotated[float, Range(0, 10080)] = 5.0
    """Minutes that a run may stand still in a step before it is reported and ended as hung. A run whose steps are long
    has ten times the median step instead. Saves, evaluations, the first step and index builds have a multiple of it
    (docs/watching.md). 0: no watchdog."""
