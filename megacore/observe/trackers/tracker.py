"""What every tracker of metrics can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megacore.config import ResolvedConfig


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a tracker follows."""

    output_dir: Path  # of the run; holds metrics.jsonl
    first_step: int  # steps done before this start; 0: a fresh run
    config: ResolvedConfig


class Tracker(Protocol):
    """Takes metrics. Every method runs in the same thread, which is not that of the training; each may raise
    anything."""

    flag: str  # the flag that chose it, for messages

    def open(self, run: RunInfo) -> None:
        """Begin, before the first record."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record, by the keys of metrics.jsonl."""

    def rewind(self, step: int) -> None:
        """The run is back at this step: drop the records after it, or let the ones that follow replace them."""

    def close(self, *, failed: bool) -> None:
        """Write what is left; `failed`: the run ended with an error."""
