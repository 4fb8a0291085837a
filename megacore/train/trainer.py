"""The training loop, the same for every model and every layout. Next batch, train step, log, evaluate, save. A step is
in step.py, the logged figures in metrics.py, saving in saving.py; whatever else watches a run is a callback
(callbacks.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count, islice
from typing import Any

from megacore.checkpoint import Manifest, TrainingState, base_mark, changed_settings, read_manifest
from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.data import Batch, BatchLoader, DeviceLoader, NamedSets, SampleDataset
from megacore.errors import TrainingDiverged
from megacore.parallel.heartbeat import Current, Phase, section
from megacore.parallel.mesh import Mesh
from megacore.remote import Location, location
from megacore.train.callbacks import Callback, Callbacks
from megacore.train.memory_check import check_memory_of_ranks
from megacore.train.metrics import StepClock, StepMetrics, StepTimes, term_means
from megacore.train.observers import observers, say
from megacore.train.rollback import Rollback, Rollbacks
from megacore.train.saving import Saving
from megacore.train.step import StepResult, TrainStep
from megacore.train.stopping import Decision, StopRequests
from megacore.train.survival import survival
from megacore.train.task import Task


class Trainer:
    """Trains a task on this rank of the mesh.

    Args:
        task: the model's layers and its loss.
        train_data: training samples; at least as many as train_iters steps take.
        valid_data: validation samples, of one set or `NamedSets`, or None for no evaluation.
        callbacks: of this rank. They are called after those of the trainer.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        task: Task,
        train_data: SampleDataset,
        valid_data: SampleDataset | None,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.mesh, self.task = config, mesh, task
        self.metrics = StepMetrics(config, mesh, task)
        if not survival().recovers:
            observers().announce(self, train_data, valid_data)
        if (tight := check_memory_of_ranks(config, mesh, task.layers)) and mesh.world.rank == 0:
            say(f"  {'warning':<10}{tight}", may_fail=config.checkpoint.on_save_error == "warn")
        self.train_steps = TrainStep(task, config, mesh)
        self.model, self.update = self.train_steps.model, self.train_steps.update
        self.parameters = self.model.parameters
        self.consumed_samples, self.rollbacks = 0, Rollbacks(config)
        load = None if config.checkpoint.load is None else location(config.checkpoint.load)
        with_optimizer = config.start.load_optim and not config.training.skip_train
        # The manifest of the checkpoint that the run resumes from, or None.
        self.loaded = None if load is None else self._resume(load, with_optimizer=with_optimizer)
        source = config.start.pretrained_checkpoint
        self._base = base_mark(None if config.lora.lora_rank is None else source)
        source = None if self._base else source  # the task has read it
        if self.loaded is None and source is not None:
            self.train_steps.load(location(source), with_optimizer=False, with_progress=False)
        self.extended: Rollback | None = None  # the last rollback, if it skips more than before this start
        if self.loaded is not None:
            self.rollbacks.load(self.loaded.series)
            self.extended = self.rollbacks.extend(self.loaded)
            self.consumed_samples = self.consumed_samples if self.extended is None else self.extended.stop_sample
        self._train_data = train_data
        self.train_steps.dataset = train_data
        self.batches = self._batches()
        self.valid_batches = None if valid_data is None else self._loader(valid_data, 0)
        self._valid_names = valid_data.names if isinstance(valid_data, NamedSets) else ("",)
        # `decision`: what all ranks do after the last step.
        self.stop_requests, self.decision = StopRequests(config.checkpoint), Decision()
        self._owes_save = False
        self.clock = StepClock(mesh.device, self.step)
        self.callbacks = Callbacks(self, [*observers().of_trainer(self), *survival().callbacks(self), *callbacks])
        self.saving = Saving(config, mesh, callbacks=self.callbacks, loaded=load, updates=self.update.updates)

    @property
    def step(self) -> int:
        return self.train_steps.step

    # ---- the run

    def run(self) -> None:
        """Train until train_iters or until a request to stop; evaluate, log and save as configured. With --skip-train
        only evaluate, once. The results are in the output directory."""
        if self.loaded is not None:
            changes = ", ".join(changed_settings(self.config, self.loaded)) or "nothing"
            self.say(f"  {'continues':<10}{self.config.checkpoint.load}, step {self.step}; changed: {changes}")
        if self.extended is not None:
            self.say(f"  {'rollback':<10}skips more by --on-spike skip-batches: {self.extended}")
        try:
            with self.stop_requests, self.saving:
                if self.config.training.skip_train:
                    self.evaluate()
                else:
                    self._train()
            with section(Phase.EXIT):
                self.model.data_parallel.ready()  # with gloo a message whose tensor is freed blocks all later ones
                stopped = self.decision.stop if self.step < self.config.training.train_iters else None
                self.say(self._summary(stopped))
                self.callbacks.call(Callback.on_stop, stopped)
        except BaseException as error:
            self.callbacks.on_error(error)
            raise

    def _train(self) -> None:
        training, intervals = self.config.training, self.config.checkpoint
        self.clock.restart(self.step)
        while not self.is_done:
            result = self.train_step(next(self.batches))
            if result.spike is not None and self.config.spikes.on_spike == "rollback" and self.roll_back(result.spike):
                self.clock.restart(self.step)
                continue
            if self._is_due(self.config.logging.log_interval):
                times = self.clock.read(self.step, self.batches.waited)
                with self.unclocked():
                    self.log(result, times)
            if self.valid_batches is not None and training.eval_interval > 0 and self._is_due(training.eval_interval):
                with self.unclocked():
                    self.evaluate()
            if self.saving.is_busy:
                self.saving.advance(some_rank_waits=self.decision.some_rank_waits)
            is_diverged = self.step >= training.train_iters and self.train_steps.suspects_weights
            if is_diverged:
                self._doubt_checkpoints()
            if self.step >= training.train_iters:
                self._require_an_update(result)
            is_due = self.decision.save or self._is_due(intervals.save_interval or 0)
            if self.is_done or is_due or (self._owes_save and not self.update.skipped_in_a_row):
                with self.unclocked():
                    self.save(is_last=self.is_done)
            if is_diverged:
                found = self.train_steps.not_finite
                steps = f"{counted(len(found), 'step')} since the last update were not finite"
                raise self._diverged(f"{steps}, and the weights may be of no use", found[-1])

    def _require_an_update(self, last: StepResult) -> None:
        """Raise TrainingDiverged if every step was skipped: nothing was learned, so nothing is saved."""
        update = self.update
        taken = self.step - (0 if self.loaded is None else self.loaded.step)
        if update.skipped_in_a_row < taken or not (update.updates == 0 or update.doubts_weights):
            return
        raise self._diverged(
            f"each of {counted(taken, 'step')} was skipped, and the weights are as they were at the start", last
        )

    def _diverged(self, what: str, last: StepResult) -> TrainingDiverged:
        remedies = self.update.remedies(loss_is_finite=math.isfinite(last.loss))
        cause, ways = "", f": use more --train-iters, {remedies}"  # of overflows that a smaller loss scale cures
        if last.diagnosis is not None:
            cause, ways = f" ({last.diagnosis})", last.diagnosis.way_out(remedies)
        return TrainingDiverged(f"{what}; the last: {last.skipped}{cause}{ways}")

    @property
    def is_done(self) -> bool:
        """Whether the last step is done, or all ranks have agreed to end."""
        return self.step >= self.config.training.train_iters or self.decision.stop is not None

    def train_step(self, microbatches: Sequence[Batch]) -> StepResult:
        """One update; sets `decision`, on which all ranks agree. `microbatches`: of this data-parallel rank, on the
        device."""
        number = self.step + 1
        self.model.runtime.timer.enabled = self._is_due(self.config.logging.log_interval, number)
        if Current.heartbeat is not None:
            Current.heartbeat.begin_step(number)
        self.callbacks.call(Callback.on_step_begin, number)
        self.train_steps.compute_gradients(microbatches)
        self.batches.prefetch()  # while an accelerator computes
        self.consumed_samples = self.batches.consumed_samples
        votes = self.stop_requests.votes(number, waiting=self.saving.is_busy and self.saving.is_waiting)
        try:
            result = self.train_steps.update_weights(votes=votes)
        except TrainingDiverged:
            self._doubt_checkpoints()
            raise
        self.decision = self.stop_requests.decision(result.votes)
        if Current.heartbeat is not None:
            Current.heartbeat.end_step()
        self.callbacks.end_step(result)
        return result

    def roll_back(self, spike: str) -> bool:
        """Return to the newest checkpoint and skip the samples that were seen since then; all ranks call this together.
        `spike`: what is wrong with the last step. Returns false: there is no checkpoint, yet or because the first save
        has just failed, and the step is only skipped. Raises TrainingDiverged where the run must stop instead, or there
        are not enough samples left."""
        self.saving.finish()
        if self.saving.newest is None:
            return False
        target, training, samples = read_manifest(self.saving.newest), self.config.training, len(self._train_data)
        rollback = self.rollbacks.add(
            spike,
            from_step=self.step,
            to_step=target.step,
            first_sample=target.consumed_samples,
            stop_sample=self.consumed_samples,
        )
        sizes = self.config.batch_sizes
        needed = sizes.samples(training.train_iters) - sizes.samples(target.step)
        if samples - rollback.stop_sample < needed:
            raise TrainingDiverged(
                f"step {self.step}: {spike}: the training data have {samples:,} samples, too few for a rollback "
                f"({rollback})"
            )
        self._resume(self.saving.newest)
        self.saving.updates = self.update.updates
        self.consumed_samples = rollback.stop_sample
        self.batches = self._batches()
        self.callbacks.call(Callback.on_rollback, rollback, spike)
        self.callbacks.call(Callback.before_save)
        self.saving.save_again(self.state())
        return True

    @section(Phase.SINK)
    def log(self, result: StepResult, times: StepTimes) -> None:
        """Report a step; all ranks call this together. `times`: how long a step took, on average since the last log."""
        figures = self.metrics.record(result, times, self.model.runtime.timer.read(), self.update)
        further = {**self.train_steps.figures(), **self.rollbacks.figures(), **self.callbacks.figures()}
        self.callbacks.call(Callback.on_log, {**self._position(), **figures, **further})

    def evaluate(self) -> float | None:
        """Mean loss over eval_iters global batches of the validation data, the same every time, without terms that only
        training has, such as label smoothing; None if there is nothing to predict. Of several sets each is evaluated;
        returns the loss of the first."""
        assert self.valid_batches is not None
        self.valid_batches.rewind()
        names, losses = self.task.evaluation_names, self.task.main_losses or len(self.task.loss_names) or None
        record: dict[str, float | None] = {}
        for of in self._valid_names:
            batches = (
                [microbatch.to(self.mesh.device, non_blocking=True) for microbatch in microbatches]
                for microbatches in islice(self.valid_batches, self.config.training.eval_iters)
            )
            evaluation = self.train_steps.evaluate(batches)
            means = term_means(names, evaluation.means, evaluation.counts, losses=losses)
            record |= {f"eval/{of}/{name}" if of else f"eval/{name}": mean for name, mean in means.items()}
        self.callbacks.call(Callback.on_evaluate, {**self._position(), **record})
        return next(iter(record.values()))

    def save(self, *, is_last: bool = True) -> None:
        """Publish a checkpoint of the current step. While steps are skipped it waits for the next update, and weights
        in doubt are not saved, so that a run that diverges goes on from sound ones; the last is published in any case.
        `is_last`: whether to wait until it is written, with --async-save too."""
        at = f"step {self.step}/{self.config.training.train_iters}"
        if not is_last and self.update.skipped_in_a_row:
            if not self._owes_save:
                self.say(f"{at} | the save waits for a step that updates the weights")
            self._owes_save = True
            return
        self._owes_save = False
        self.callbacks.call(Callback.before_save)
        self.train_steps.require_finite()
        doubt = self.train_steps.doubt()
        if doubt is not None and not is_last:
            self.say(f"warning: {at} | not saved: {doubt}")
            return
        self.saving.save(self.state(in_doubt=doubt is not None), is_last=is_last)

    def _doubt_checkpoints(self) -> None:
        """Mark in doubt the checkpoints of the weights with which the last steps were not finite."""
        if self.train_steps.suspects_weights:
            self.saving.doubt(self.update.updates)

    def emit(self, kind: str, **values: Any) -> None:
        self.callbacks.emit(kind, **values)

    def say(self, text: str) -> None:
        """Tell the user something; rank 0 prints it."""
        self.callbacks.say(text)

    def request_stop(self, reason: str) -> None:
        """End the run after the next step, on all ranks, with a checkpoint. `reason`: ends the output: "stopped by
        {reason}"."""
        self.stop_requests.request(reason)

    def unclocked(self) -> AbstractContextManager[None]:
        return self.clock.paused()

    def state(self, *, in_doubt: bool = False) -> TrainingState:
        """This rank's view of the run, for a checkpoint, which `--load auto` passes over if it is in doubt."""
        series = self.rollbacks.series() | self._base
        return self.train_steps.state(consumed_samples=self.consumed_samples, in_doubt=in_doubt, series=series)

    # ---- its parts

    def _resume(self, directory: Location, *, with_optimizer: bool = True) -> Manifest:
        manifest = self.train_steps.load(directory, with_optimizer=with_optimizer)
        self.consumed_samples = manifest.consumed_samples
        return manifest

    def _batches(self) -> DeviceLoader[Any]:
        ramps = bool(self.config.rampup.rampup_batch_size)
        sizes = map(self.config.batch_sizes.of_step, count(self.step + 1)) if ramps else None
        return DeviceLoader(self._loader(self._train_data, self.consumed_samples, sizes), self.mesh.device)

    def _loader(
        self, dataset: SampleDataset, consumed_samples: int, sizes: Iterator[int] | None = None
    ) -> BatchLoader[Any]:
        training = self.config.training
        return BatchLoader(
            dataset,
            self.task.batch_type,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=sizes or training.global_batch_size,
            rank=self.mesh.batch.rank,
            ranks=self.mesh.batch.size,
            consumed_samples=consumed_samples,
            num_workers=self.config.data.num_workers,
            pin_memory=self.mesh.device.type != "cpu",
        )

    def _is_due(self, interval: int, step: int | None = None) -> bool:
        """Whether a step, by default the last one taken, is a multiple of `interval` (0: none is) or the last of the
        run."""
        step = self.step if step is None else step
        return step == self.config.training.train_iters or (interval > 0 and step % interval == 0)

    def _position(self) -> Mapping[str, int]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_samples * self.config.data.seq_length,
        }

    def _summary(self, stopped: str | None) -> str:
        training = self.config.training
        if training.skip_train:
            return f"evaluated at step {self.step}, without training; the output is in {training.output_dir}"
        ended = f"stopped by {stopped}: {self.step} of {training.train_iters}" if stopped else f"done: {self.step}"
        skipped = f", {self.update.skipped_steps} of them skipped" if self.update.skipped_steps else ""
        way = "; the same command with --load auto continues" if stopped else ""
        return f"{ended} steps{skipped}, {self.consumed_samples:,} samples; the output is in {training.output_dir}{way}"
