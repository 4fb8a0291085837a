"""Ledger records for tests, without the ranks that would write them."""

from __future__ import annotations

from typing import Any

from megacore.parallel.heartbeat import Phase
from megacore.watch.blame import Seen, State
from megacore.watch.ledger import Identity
from megacore.watch.record import Record


def identity(rank: int, world_size: int, **changes: Any) -> Identity:
    """What a rank of a job on one node says about itself; its ranks are data-parallel unless `degrees` are given."""
    values: dict[str, Any] = {
        "rank": rank, "world_size": world_size, "local_world_size": world_size, "host": "host", "pid": 1000 + rank,
        "born": 1, "degrees": {"pp": 1, "dp": world_size, "tp": 1}, "output_dir": "out", "hang_timeout": 10.0,
        "collective_timeout": 600.0,
    }  # fmt: skip
    return Identity(**{**values, **changes})


def seen(
    rank: int, world_size: int, *, state: State = "running", is_busy: bool = False, about: dict[str, Any] | None = None,
    **changes: Any,
) -> Seen:  # fmt: skip
    """A rank in the middle of step 7, with changes."""
    values: dict[str, Any] = {"phase": Phase.FORWARD, "section": Phase.STEP, "age": 20.0, "step": 7}
    record = Record(identity=identity(rank, world_size, **(about or {})), **{**values, **changes})
    return Seen(record=record, state=state, is_busy=is_busy)
