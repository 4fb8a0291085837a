"""The cores of the host: how many a process, or a rank, may use, and when a rank gives its core to another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from fractions import Fraction


def cores_of_process() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def available_cores() -> int:
    """How many cores this process may use."""
    return len(cores_of_process())


def share_of_cores(cores: frozenset[int], node: Sequence[frozenset[int]]) -> int:
    """A rank's share of its node's cores, at least 1: a core that n ranks may use counts 1/n for each of them.

    So a rank has all cores that only it may use, and ranks that may use the same cores divide them.

    Args:
        cores: that the rank may use.
        node: the same for every rank of its node, this one among them.
    """
    return max(1, int(sum(Fraction(1, sum(core in others for others in node)) for core in cores)))


def take_long_turns() -> None:
    """Let no thread interrupt the one that computes on its core, in this process: Linux's policy SCHED_BATCH, for this
    thread and those that it starts.

    By default a thread that wakes up, as those of gloo do for every piece of a message, interrupts the one that
    computes, whose part of a matrix product leaves the cache. Now it waits for the end of a turn, a few milliseconds.
    Nothing changes on other systems, or where the user chose a policy (chrt).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
