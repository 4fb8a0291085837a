"""Which rank is slow: the time that each rank computes, compared with the other ranks of its pipeline stage.

A rank that waits for a slow rank takes as long as that rank, so only the time without communication tells them apart.
Waits for data and Python's garbage collection are counted separately, as different causes.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacore.watch.ledger import Phase

NOTICEABLE = 1.25
"""A rank is slow if its time is at least this multiple of the median of its stage."""
_NOTICEABLE_SECONDS = 0.005  # per step: less is the noise of the machine
_WINDOW = 16  # steps that one comparison is over
_IN_A_ROW = 2
_COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP, Phase.FIRST_STEP)


@dataclass(frozen=True)
class Times:
    """Seconds of a rank."""

    compute: float = 0.0
    data: float = 0.0
    gc: float = 0.0
    communication: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(*map(operator.add, self._values, other._values))

    def per(self, steps: int) -> Times:
        """The mean of a step."""
        return Times(*(seconds / steps for seconds in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        return self.compute, self.data, self.gc, self.communication  # `astuple` takes ten times as long


@dataclass(frozen=True)
class Straggler:
    """The slowest rank beside its stage.

    Attributes:
        rank: its number.
        ratio: its computing time over the median of its stage.
        excess: seconds by which it is above that median.
        times: its own.
    """

    rank: int
    ratio: float
    excess: float
    times: Times

    @property
    def is_noticeable(self) -> bool:
        return self.ratio > NOTICEABLE and self.excess > _NOTICEABLE_SECONDS


def times_between(before: Sequence[float], after: Sequence[float], gc: float) -> Times:
    """What a ledger's `seconds` say about the time between two readings.

    Args:
        before: the first reading.
        after: the second one.
        gc: seconds of garbage collection in between.
    """
    spent = [b - a for a, b in zip(before, after, strict=True)]
    compute = sum(spent[phase] for phase in _COMPUTING)
    communication = sum(spent[phase] for phase in Phase if phase.communicates)
    return Times(compute=max(0.0, compute - gc), data=spent[Phase.DATA], gc=gc, communication=communication)


def slowest(times: Mapping[int, Times], stages: Mapping[int, int]) -> Straggler:
    """The rank that is furthest above the median of its stage.

    Args:
        times: by rank.
        stages: number of each rank's place in the pipeline.
    """
    alike: dict[int, list[float]] = {}
    for rank, own in times.items():
        alike.setdefault(stages[rank], []).append(own.compute)
    medians = {stage: statistics.median_low(computed) for stage, computed in alike.items()}  # of two the faster one
    stragglers = []
    for rank, own in times.items():
        median = medians[stages[rank]]
        ratio = own.compute / median if median > 0 else 1.0
        stragglers.append(Straggler(rank, ratio, own.compute - median, own))
    return max(stragglers, key=lambda one: (one.ratio, -one.rank))


class Noticed:
    """Says when a rank has been slow for long enough, and once only until it is as fast as the others again."""

    def __init__(self) -> None:
        self._times: dict[int, Times] = {}
        self._steps = self._in_a_row = 0
        self._last: int | None = None

    def add(self, times: Mapping[int, Times], steps: int, stages: Mapping[int, int]) -> Straggler | None:
        """The slow rank, with its times per step, if it is to be named now.

        Args:
            times: of some steps, by rank.
            steps: their number.
            stages: of the ranks.
        """
        self._times = {rank: self._times.get(rank, Times()) + own for rank, own in times.items()}
        self._steps += steps
        if self._steps < _WINDOW:
            return None
        straggler = slowest({rank: own.per(self._steps) for rank, own in self._times.items()}, stages)
        self._times, self._steps = {}, 0
        rank = straggler.rank if straggler.is_noticeable else None
        self._in_a_row = self._in_a_row + 1 if rank is not None and rank == self._last else int(rank is not None)
        self._last = rank
        return straggler if self._in_a_row == _IN_A_ROW else None
