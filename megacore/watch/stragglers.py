"""Which rank is slow: the time that each rank computes, compared with the other ranks of its pipeline stage. A rank
that waits for a slow rank takes as long as that rank, so only the time without communication tells them apart. Waits
for data and Python's garbage collection are counted separately, as different causes."""

from __future__ import annotations

import gc
import operator
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from megacore.config.dimensions import pipeline_dimension
from megacore.parallel.collectives import all_gather_objects, all_reduce_job_, rows_of_ranks
from megacore.parallel.heartbeat import Phase
from megacore.parallel.mesh import Mesh
from megacore.train.callbacks import Callback, Run
from megacore.train.rollback import Rollback
from megacore.watch.ledger import Ledger, this_ledger

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
    """The slowest rank beside its stage."""

    rank: int
    ratio: float  # its computing time over the median of its stage
    excess: float  # seconds by which it is above that median
    times: Times

    @property
    def is_noticeable(self) -> bool:
        return self.ratio > NOTICEABLE and self.excess > _NOTICEABLE_SECONDS


def times_between(before: Sequence[float], after: Sequence[float], gc: float) -> Times:
    """What a ledger's `seconds` say about the time between two readings. `gc`: seconds of garbage collection in
    between."""
    spent = [b - a for a, b in zip(before, after, strict=True)]
    compute = sum(spent[phase] for phase in _COMPUTING)
    communication = sum(spent[phase] for phase in Phase if phase.communicates)
    return Times(compute=max(0.0, compute - gc), data=spent[Phase.DATA], gc=gc, communication=communication)


def slowest(times: Mapping[int, Times], stages: Mapping[int, int]) -> Straggler:
    """The rank that is furthest above the median of its stage. `stages`: number of each rank's place in the
    pipeline."""
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
        """The slow rank, with its times per step, if it is to be named now. `times`: of some steps, by rank."""
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


class Stragglers(Callback):
    """Compares at every logged step how long the ranks computed; all ranks do so together, if all are watched."""

    def __init__(self, mesh: Mesh, *, first_step: int) -> None:
        unwatched = torch.tensor(float(this_ledger() is None), dtype=torch.float64, device=mesh.device)
        self._compares = not all_reduce_job_(unwatched, mesh, "max").item()
        self._hosts = all_gather_objects(socket.gethostname(), mesh.world) if self._compares else []
        name = pipeline_dimension(mesh.dimensions)
        self._mesh, self._step = mesh, first_step
        self._stages = {rank: mesh.coordinates(rank)[name] for rank in range(mesh.world.size)}
        self._seconds: list[float] = []
        self._gc, self._gc_began = 0.0, 0.0
        self._noticed = Noticed()

    def on_step_begin(self, run: Run, step: int) -> None:
        if self._compares and not self._seconds and (ledger := this_ledger()):
            self._begin(ledger, step - 1)
            gc.callbacks.append(self._on_gc)

    def figures(self, run: Run) -> Mapping[str, float]:
        """perf/straggler_*: the slowest rank beside its stage; names it if it is slow for long."""
        steps = run.step - self._step
        if not self._seconds or steps == 0 or (ledger := this_ledger()) is None:
            return {}
        times = self._of_ranks(run, times_between(self._seconds, ledger.seconds, self._gc), steps)
        self._begin(ledger, run.step)
        if (named := self._noticed.add(times, steps, self._stages)) is not None:
            run.say(f"step {run.step}/{run.config.training.train_iters} | {self._line(named)}")
        straggler = slowest({rank: own.per(steps) for rank, own in times.items()}, self._stages)
        own = {f"perf/straggler_{name}_s": getattr(straggler.times, name) for name in Times.__dataclass_fields__}
        return {"perf/straggler_rank": straggler.rank, "perf/straggler_ratio": straggler.ratio, **own}

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        if self._seconds and (ledger := this_ledger()):
            self._begin(ledger, rollback.to_step)

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._end()

    def on_error(self, run: Run, error: BaseException) -> None:
        self._end()

    def _begin(self, ledger: Ledger, step: int) -> None:
        self._seconds, self._gc, self._step = list(ledger.seconds), 0.0, step

    def _end(self) -> None:
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, event: str, about: Mapping[str, Any]) -> None:
        if event == "start":
            self._gc_began = time.perf_counter()
        else:
            self._gc += time.perf_counter() - self._gc_began

    def _of_ranks(self, run: Run, own: Times, steps: int) -> dict[int, Times]:
        """Every rank's seconds; on a device what it computed, which the program does not see."""
        device = self._mesh.device
        if device.type != "cpu":
            own = Times(run.model.runtime.timer.read().busy_seconds * steps, own.data, own.gc, own.communication)
        everyone = rows_of_ranks(astuple(own), self._mesh)
        return {rank: Times(*values) for rank, values in enumerate(everyone.tolist())}

    def _line(self, straggler: Straggler) -> str:
        where = f"{self._mesh.describe(straggler.rank)}, on {self._hosts[straggler.rank]}"
        times = straggler.times
        return (
            f"slow: rank {straggler.rank} ({where}) computes {times.compute:.3f} s/step, {straggler.ratio:.2f} x its "
            f"stage (data {times.data:.3f}, gc {times.gc:.3f}, communication {times.communication:.3f})"
        )
