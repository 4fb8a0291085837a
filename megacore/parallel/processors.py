"""How many of the host's processors a process, or a rank, may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_rank() -> int:
    """This rank's share of them, among the ranks that the launcher started on its node; at least 1."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
