"""The number of the host's cores that a process, or a rank, may use."""

from __future__ import annotations

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
