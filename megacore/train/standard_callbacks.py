"""The trainer's own callbacks, in the order in which they are called: what watches, guards and records a run joins here
with one entry of the list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.train.callbacks import Callback
from megacore.train.history import History
from megacore.train.profiling import Profiling, StepProfiler
from megacore.train.replicas import ReplicaCheck, ReplicaChecks
from megacore.train.tracing import Tracer
from megacore.train.trackers.callback import Trackers, chosen_trackers
from megacore.train.trackers.tracker import RunInfo
from megacore.train.watchdog import watchdog

if TYPE_CHECKING:
    from megacore.train.trainer import Trainer


def standard_callbacks(trainer: Trainer) -> list[Callback]:
    """Those that a configuration asks for on this rank; the run's report is one of them.

    Args:
        trainer: before its first step.
    """
    return [
        *watchdog().callbacks(trainer.mesh, trainer.report, first_step=trainer.step),
        *_replica_checks(trainer),
        trainer.report,
        _history(trainer),
        *_trackers(trainer),
        *_tracers(trainer),
        *_profilers(trainer),
    ]


def _replica_checks(trainer: Trainer) -> Iterator[Callback]:
    interval, loaded = trainer.config.watch.check_replicas_interval, trainer.config.checkpoint.load
    if interval and trainer.mesh.world.size > 1:
        optimizer = trainer.update.optimizer
        yield ReplicaChecks(ReplicaCheck(trainer.model, optimizer, trainer.mesh, interval=interval, loaded=loaded))


def _history(trainer: Trainer) -> History:
    return History(
        Path(trainer.config.training.output_dir),
        first_step=trainer.step,
        provenance=trainer.provenance,
        degrees=trainer.mesh.degrees,
        load=trainer.config.checkpoint.load,
        predicted_peak=trainer.metrics.predicted_peak,
    )


def _trackers(trainer: Trainer) -> Iterator[Callback]:
    config = trainer.config
    trackers = list(chosen_trackers(config.logging))
    if trackers and trainer.mesh.world.is_first:
        run = RunInfo(output_dir=Path(config.training.output_dir), first_step=trainer.step, config=config)
        yield Trackers(trackers, run)


def _tracers(trainer: Trainer) -> Iterator[Callback]:
    config = trainer.config
    if config.logging.trace:
        last = trainer.step + config.logging.traced_steps + 1
        microbatches = config.batch_sizes.of_step(last) // config.replica_batch_size
        yield Tracer(
            config,
            trainer.mesh,
            trainer.model.runtime,
            trainer.report,
            first_step=trainer.step,
            microbatches=microbatches,
        )


def _profilers(trainer: Trainer) -> Iterator[Callback]:
    steps, output_dir = trainer.config.logging.profiled_steps(), Path(trainer.config.training.output_dir)
    if steps and steps[-1] > trainer.step:
        rank, device = trainer.mesh.world.rank, trainer.mesh.device
        yield Profiling(StepProfiler(steps, output_dir=output_dir, rank=rank, device=device), trainer.report.say)
