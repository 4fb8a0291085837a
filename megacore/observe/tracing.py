"""`--trace`: notes what this rank does in some steps, and leaves the trace of all ranks in the output directory as soon
as the last of them is done. The first step of a run is left out where there is another: it warms caches up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megacore.config import ResolvedConfig
from megacore.config.dimensions import group_in_words, named_degrees
from megacore.drawing.trace_file import RankTrace, TracedStep, TracedTransfer, write_trace
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.heartbeat import Current, Phase
from megacore.parallel.mesh import Mesh
from megacore.pipeline.runtime import ActionTimer, Mark, PipelineRuntime
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult


class _Copy(NamedTuple):
    """A copy from or to host memory, with the marks before and after it in its stream."""

    name: str
    nbytes: int
    start: Mark
    end: Mark


class _Transfers:
    """Notes when this rank was in which collective, and when its device copied from and to host memory."""

    def __init__(self, mesh: Mesh, timer: ActionTimer) -> None:
        self._degrees, self._device, self._timer = mesh.degrees, mesh.device, timer
        self.noted: list[TracedTransfer] = []
        self._numbers = itertools.count()
        self._copies: list[_Copy] = []

    def clear(self) -> None:
        self.noted, self._copies = [], []

    def around(
        self, kind: Phase, ranks: tuple[int, ...], nbytes: int, wait: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """A context that notes its time; messages are the pipeline's, which the timer notes."""
        if kind.is_message:
            return wait
        name = f"{kind.in_words} {group_in_words(ranks, self._degrees)}"
        return _Noted(self.noted, TracedTransfer(name, nbytes, 0.0, 0.0, next(self._numbers)), wait)

    @contextmanager
    def copying(self, name: str, nbytes: int) -> Iterator[None]:
        """A context that marks the beginning and the end of a copy in the current stream."""
        start = self._timer.mark()
        yield
        self._copies.append(_Copy(name, nbytes, start, self._timer.mark()))

    def copies(self) -> tuple[TracedTransfer, ...]:
        """When the device copied; waits until it has."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the streams of copies too
        seconds = self._timer.seconds([mark for one in self._copies for mark in (one.start, one.end)])
        times = zip(seconds[::2], seconds[1::2], strict=True)
        return tuple(TracedTransfer(*one[:2], *at) for one, at in zip(self._copies, times, strict=True))


class _Noted(AbstractContextManager["_Noted"]):
    """Notes each time that it is entered: once where a collective is waited for at once, else to post and to wait."""

    def __init__(self, noted: list[TracedTransfer], one: TracedTransfer, wait: AbstractContextManager[Any]) -> None:
        self._noted, self._one, self._wait = noted, one, wait

    def __enter__(self) -> _Noted:
        self._start = time.time()
        self._wait.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wait.__exit__(*error)
        self._noted.append(self._one._replace(start=self._start, end=time.time()))


class Tracer(Callback):
    """Traces the steps that `--trace` and `--trace steps` ask for, if any. `first_step`: steps done before this run."""

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        runtime: PipelineRuntime,
        *,
        first_step: int,
        microbatches: int,
    ) -> None:
        last = config.training.train_iters
        # Not the first step after this start, which allocates memory and looks like no other.
        first = min(first_step + 2, last)
        self.steps = range(first, min(first + config.logging.traced_steps, last + 1))
        self.path = Path(config.training.output_dir) / "trace.json"
        self._mesh, self._runtime, self._microbatches = mesh, runtime, microbatches
        self._traced: dict[int, TracedStep] = {}  # by number: one that a rollback repeats is there once
        self._transfers = _Transfers(mesh, runtime.timer)

    def on_step_begin(self, run: Run, step: int) -> None:
        """Let the runtime's timer note what a traced step does."""
        if step in self.steps:
            self._runtime.timer.enabled = self._runtime.timer.tracing = True
            self._transfers.clear()
            Current.listener = self._transfers

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Take what the timer noted; write the file after the last step."""
        if result.step in self.steps:
            Current.listener = None
            timed, transfers = self._runtime.timer.read(), self._transfers
            self._traced[result.step] = TracedStep(
                result.step,
                timed.start,
                timed.end,
                timed.actions,
                timed.read,
                collectives=tuple(transfers.noted),
                copies=transfers.copies(),
            )
            self._runtime.timer.tracing = False
            if result.step == self.steps[-1]:
                with run.unclocked():
                    self._write()
                run.say(f"step {result.step}/{run.config.training.train_iters} | traced {self.path}")

    def on_error(self, run: Run, error: BaseException) -> None:
        Current.listener = None

    def _write(self) -> None:
        """Gather the traces of all ranks and write the file, on the first."""
        named = named_degrees(self._mesh.degrees)
        coordinates = {d: at for d, at in self._mesh.coordinates(self._mesh.world.rank).items() if d in named}
        trace = RankTrace(coordinates=coordinates, steps=tuple(self._traced.values()))
        ranks = all_gather_objects(trace, self._mesh.world)
        if self._mesh.world.rank == 0:
            write_trace(self.path, ranks, self._runtime.schedule(self._microbatches, trains=True))
