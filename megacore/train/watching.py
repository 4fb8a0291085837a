"""The trainer's side of the watchdog (megacore/watch/): steps are marked, slow ranks found, and replicas compared."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch

from megacore.checkpoint.save import Saved
from megacore.config import ResolvedConfig
from megacore.config.dimensions import pipeline_dimension
from megacore.parallel.collectives import all_gather_objects, all_reduce_job_, rows_of_ranks
from megacore.parallel.mesh import Mesh
from megacore.train.callbacks import Callback, Run
from megacore.train.replicas import ReplicaCheck
from megacore.train.rollback import Rollback
from megacore.train.sinks import Report
from megacore.train.step import StepResult
from megacore.watch.ledger import Flag, Ledger
from megacore.watch.marks import Current
from megacore.watch.stragglers import Noticed, Straggler, Times, slowest, times_between


def begin_step(step: int, config: ResolvedConfig, mesh: Mesh) -> None:
    """Tell this process's ledger, if it has one, that a step begins, and what its reader must know about the run."""
    if Current.ledger is None:
        return
    if Current.ledger.first_step:
        if mesh.device.type != "cpu":
            Current.ledger.set_flag(Flag.ASYNCHRONOUS)
        if config.training.compile and mesh.layer.size > 1:
            Current.ledger.set_flag(Flag.HIDDEN)
    Current.ledger.begin_step(step)


class StepMarks(Callback):
    """Tells this process's ledger, if it has one, where steps begin and end."""

    def on_step_begin(self, run: Run, step: int) -> None:
        """The step begins."""
        begin_step(step, run.config, run.mesh)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """The step is done."""
        if Current.ledger is not None:
            Current.ledger.end_step()


class Stragglers(Callback):
    """Compares at every logged step how long the ranks computed; all ranks do so together, if all are watched.

    Args:
        mesh: this rank's groups; all ranks make this object together.
        report: names a slow rank.
        first_step: steps done before this run.
    """

    def __init__(self, mesh: Mesh, report: Report, *, first_step: int) -> None:
        unwatched = torch.tensor(float(Current.ledger is None), dtype=torch.float64, device=mesh.device)
        self._compares = mesh.world.size > 1 and not all_reduce_job_(unwatched, mesh, "max").item()
        self._hosts = all_gather_objects(socket.gethostname(), mesh.world) if self._compares else []
        name = pipeline_dimension(mesh.dimensions)
        self._mesh, self._report, self._step = mesh, report, first_step
        self._stages = {rank: mesh.coordinates(rank)[name] for rank in range(mesh.world.size)}
        self._seconds: list[float] = []
        self._gc, self._gc_began = 0.0, 0.0
        self._noticed = Noticed()

    def on_step_begin(self, run: Run, step: int) -> None:
        """Begin to count."""
        if self._compares and Current.ledger is not None and not self._seconds:
            self._begin(Current.ledger, step - 1)
            gc.callbacks.append(self._on_gc)

    def figures(self, run: Run) -> Mapping[str, float]:
        """perf/straggler_*: the slowest rank beside its stage; names it if it is slow for long."""
        steps = run.step - self._step
        if Current.ledger is None or not self._seconds or steps == 0:
            return {}
        times = self._of_ranks(run, times_between(self._seconds, Current.ledger.seconds, self._gc), steps)
        self._begin(Current.ledger, run.step)
        if (named := self._noticed.add(times, steps, self._stages)) is not None:
            self._report.say(f"step {run.step}/{run.config.training.train_iters} | {self._line(named)}")
        straggler = slowest({rank: own.per(steps) for rank, own in times.items()}, self._stages)
        own = {f"perf/straggler_{name}_s": getattr(straggler.times, name) for name in Times.__dataclass_fields__}
        return {"perf/straggler_rank": straggler.rank, "perf/straggler_ratio": straggler.ratio, **own}

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Begin anew at the step that the run is back at."""
        if Current.ledger is not None and self._seconds:
            self._begin(Current.ledger, rollback.to_step)

    def on_stop(self, run: Run, reason: str | None) -> None:
        """Count no longer."""
        self._end()

    def on_error(self, run: Run, error: BaseException) -> None:
        """Count no longer."""
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


class ReplicaChecks(Callback):
    """Compares replicas every `--check-replicas-interval` steps and before each save.

    Args:
        check: of this rank's tensors.
    """

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Check if the step is due."""
        self._check.after_step(result.step)

    def before_save(self, run: Run) -> None:
        """Nothing is saved that has not been checked."""
        self._check.before_save(run.step)

    def on_save(self, run: Run, saved: Saved) -> None:
        """Where the run could go back to."""
        self._check.saved(saved.path)

    def figures(self, run: Run) -> Mapping[str, float]:
        """The last step after which all replicas were equal."""
        checked = self._check.checked_step
        return {} if checked is None else {"watch/replicas_checked_step": checked}
