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

DEFAULT_STEPS = 3


class Tracer:
    """Traces the steps that `--trace` and `--trace-steps` ask for, if any.

    Args:
        config: resolved.
        mesh: this rank's place.
        runtime: whose passes are traced.
        first_step: steps done before this run.
    """

    def __init__(self, config: ResolvedConfig, mesh: Mesh, runtime: PipelineRuntime, first_step: int) -> None:
        last = config.training.train_iters
        first = min(first_step + 2, last)
        count = (config.logging.trace_steps or DEFAULT_STEPS) if config.logging.trace else 0
        self.steps = range(first, min(first + count, last + 1))
        self.path = Path(config.training.output_dir) / "trace.json"
        self._mesh, self._runtime = mesh, runtime
        self._noted: list[TracedStep] = []

    def begin(self, step: int) -> bool:
        """Says before each step whether it is traced."""
        self._runtime.timer.tracing = step in self.steps
        return self._runtime.timer.tracing

    def end(self, step: int) -> None:
        """Takes what the runtime's timer noted of the step."""
        if step in self.steps:
            timed = self._runtime.timer.read()
            self._noted.append(TracedStep(step, timed.start, timed.end, timed.actions))
            self._runtime.timer.tracing = False

    def is_complete(self, step: int) -> bool:
        """Whether this step was the last one to trace: then every rank calls `write`."""
        return bool(self.steps) and step == self.steps[-1]

    def write(self, microbatches: int) -> None:
        """Gather the traces of all ranks and write the file, on the first.

        Args:
            microbatches: of a replica in a step.
        """
        coordinates = self._mesh.coordinates(self._mesh.world.rank)
        trace = RankTrace(coordinates=coordinates, steps=tuple(self._noted))
        ranks = all_gather_objects(trace, self._mesh.world)
        if self._mesh.world.rank == 0:
            write_trace(self.path, ranks, self._runtime.training_schedule(microbatches))
        self._noted = []
