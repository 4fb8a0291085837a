"""`--trace`: notes what this rank does in some steps, and leaves the trace of all ranks in the output directory.

The first step of a run is left out where there is another: it allocates memory and warms caches up, and looks like no
other. The file is written as soon as the last of the steps is done, so that it is there even if the run is ended later.
"""

from __future__ import annotations

from pathlib import Path

from megacore.config import ResolvedConfig
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.pipeline.runtime import PipelineRuntime
from megacore.plan.trace import RankTrace, TracedStep, write_trace
from megacore.train.callbacks import Callback, Run
from megacore.train.sinks import Report
from megacore.train.step import StepResult

DEFAULT_STEPS = 3


class Tracer(Callback):
    """Traces the steps that `--trace` and `--trace-steps` ask for, if any.

    Args:
        config: resolved.
        mesh: this rank's groups.
        runtime: whose passes are traced.
        report: prints where the trace is.
        first_step: steps done before this run.
        microbatches: per replica and step.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        runtime: PipelineRuntime,
        report: Report,
        *,
        first_step: int,
        microbatches: int,
    ) -> None:
        last = config.training.train_iters
        first = min(first_step + 2, last)
        count = (config.logging.trace_steps or DEFAULT_STEPS) if config.logging.trace else 0
        self.steps = range(first, min(first + count, last + 1))
        self.path = Path(config.training.output_dir) / "trace.json"
        self._mesh, self._runtime, self._report, self._microbatches = mesh, runtime, report, microbatches
        self._traced: list[TracedStep] = []

    def on_step_begin(self, run: Run, step: int) -> None:
        """Let the runtime's timer note what a traced step does."""
        if step in self.steps:
            self._runtime.timer.enabled = self._runtime.timer.tracing = True

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Take what the timer noted; write the file after the last step."""
        if result.step in self.steps:
            timed = self._runtime.timer.read()
            self._traced.append(TracedStep(result.step, timed.start, timed.end, timed.actions, updated=timed.read))
            self._runtime.timer.tracing = False
            if result.step == self.steps[-1]:
                with run.unclocked():
                    self._write()
                self._report.say(f"step {result.step}/{run.config.training.train_iters} | traced {self.path}")

    def _write(self) -> None:
        """Gather the traces of all ranks and write the file, on the first."""
        coordinates = self._mesh.coordinates(self._mesh.world.rank)
        trace = RankTrace(coordinates=coordinates, steps=tuple(self._traced))
        ranks = all_gather_objects(trace, self._mesh.world)
        if self._mesh.world.rank == 0:
            write_trace(self.path, ranks, self._runtime.schedule(self._microbatches, trains=True))
        self._traced = []
