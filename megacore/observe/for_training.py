"""What the observers do for a run (megacore/train/observers.py): what watches, guards or records one joins here with an
entry of a list."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacore import has_ring
from megacore.config import ResolvedConfig
from megacore.data import SampleDataset
from megacore.errors import ConfigError
from megacore.observe import diagnosis
from megacore.observe.events import EngineEvents, Events, MemoryOfRanks
from megacore.observe.gradient_noise import GradientNoise
from megacore.observe.narrator import Bar, Narrator
from megacore.observe.profiling import DIRECTORY, Profiling
from megacore.observe.provenance import provenance_of
from megacore.observe.replay import Replay
from megacore.observe.replicas import ReplicaChecks
from megacore.observe.sinks import Console, EventsFile, MetricsFile, Sink
from megacore.observe.summary import announcement
from megacore.observe.tracing import Tracer
from megacore.observe.trackers.background import background_sinks, warn
from megacore.observe.trackers.tracker import RunInfo
from megacore.optim.nonfinite import NonFinite
from megacore.parallel.mesh import Mesh
from megacore.train.callbacks import Callback, Event
from megacore.train.engine import PipelineEngine
from megacore.train.observers import Observers, say
from megacore.train.parallelize import ParallelModel
from megacore.train.step import BatchLossWeight, Diagnosis, TrainStep
from megacore.train.step_hooks import StepHook
from megacore.train.trainer import Trainer
from megacore.train.watchdog import watchdog


class _Observers(Observers):
    def announce(self, trainer: Trainer, train_data: SampleDataset, valid_data: SampleDataset | None) -> None:
        if trainer.mesh.world.is_first:
            may_fail = trainer.config.checkpoint.on_save_error == "warn"
            say(announcement(trainer, train_data, valid_data), may_fail=may_fail)

    def of_trainer(self, trainer: Trainer) -> list[Callback]:
        config, mesh, train_iters = trainer.config, trainer.mesh, trainer.config.training.train_iters
        events, bar = Events(_sinks(trainer) if mesh.world.is_first else ()), list[Callback]()
        if mesh.world.is_first and sys.stderr.isatty():
            bar.append(Bar(train_iters, trainer.step))
        return [
            *watchdog().callbacks(mesh, first_step=trainer.step),
            *_replica_checks(trainer, loaded=config.checkpoint.load),
            MemoryOfRanks(trainer.metrics.predicted_peak),
            *bar,
            events,
            Narrator(train_iters, terms=trainer.task.loss_names),
            *_tracers(trainer),
            *_profilers(trainer),
            *_ledger(trainer),
        ]

    def of_engine(self, engine: PipelineEngine) -> list[Callback]:
        events = [EngineEvents()] if engine.mesh.world.is_first else []
        return [*_replica_checks(engine), *events, *_profilers(engine)]

    def step_hooks(self, model: ParallelModel, config: ResolvedConfig, mesh: Mesh) -> list[StepHook]:
        hooks: list[StepHook] = []
        if config.logging.gradient_noise_interval:
            hooks.append(GradientNoise(config))
        if config.watch.replay_interval:
            hooks.append(Replay(model, config, mesh))
        return hooks

    def diagnose(
        self, steps: TrainStep, microbatches: Sequence[Any], weight: BatchLossWeight, *, last_loss: float
    ) -> Diagnosis:
        return diagnosis.diagnose(steps, microbatches, weight, last_loss=last_loss)

    def fault_in_words(self, steps: TrainStep, non_finite: Sequence[NonFinite]) -> str | None:
        return diagnosis.fault_in_words(steps, non_finite)


def _replica_checks(run: Trainer | PipelineEngine, *, loaded: str | None = None) -> Iterator[Callback]:
    interval, optimizer = run.config.watch.check_replicas_interval, run.update.optimizer
    if interval and run.mesh.world.size > 1:
        yield ReplicaChecks(run.model, optimizer, run.mesh, interval=interval, loaded=loaded)


def _sinks(trainer: Trainer) -> list[Sink]:
    config, first_step = trainer.config, trainer.step
    output_dir, may_drop = Path(config.training.output_dir), config.checkpoint.on_save_error == "warn"
    events = EventsFile(output_dir, first_step=first_step, warn=warn)
    metrics = MetricsFile(output_dir, first_step=first_step, say=trainer.say, may_drop=may_drop)
    launch = {"degrees": dict(trainer.mesh.degrees), "load": config.checkpoint.load}
    events.take(Event(first_step, "launch", provenance_of(trainer.mesh) | launch))
    run = RunInfo(output_dir=output_dir, first_step=first_step, config=config)
    return [Console(may_fail=may_drop), metrics, events, *background_sinks(run)]


def _ledger(trainer: Trainer) -> Iterator[Callback]:
    if trainer.config.watch.ledger:
        if not has_ring("audit"):
            raise ConfigError(["--ledger needs megacore/audit, which is not installed: leave it out"])
        yield importlib.import_module("megacore.audit.recorder").Recorder(trainer)


def _tracers(trainer: Trainer) -> Iterator[Callback]:
    config = trainer.config
    if config.logging.trace:
        last = trainer.step + config.logging.traced_steps + 1
        microbatches = config.batch_sizes.of_step(last) // config.replica_batch_size
        yield Tracer(config, trainer.mesh, trainer.model.runtime, first_step=trainer.step, microbatches=microbatches)


def _profilers(run: Trainer | PipelineEngine) -> Iterator[Callback]:
    steps = run.config.logging.profiled_steps()
    if steps and steps[-1] > run.step:
        path = Path(run.config.training.output_dir, DIRECTORY, f"rank_{run.mesh.world.rank}.json.gz")
        yield Profiling(steps, path=path, device=run.mesh.device)


OBSERVERS = _Observers()
