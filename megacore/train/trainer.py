"""The training loop, the same for every model and every layout.

One step: every rank runs its microbatches through its stage (pipeline/runtime.py), gradients are summed over
data-parallel ranks while the last backward runs and over the copies of tied parameters after it, the global norm is
clipped, the optimizer steps. The loss, or each of its terms, is divided by the number of tokens (or of what else it
sums over) of the whole global batch, known before the first backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.check import changed_settings
from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.manifest import Manifest
from megacore.checkpoint.state import TrainingState
from megacore.config import ResolvedConfig
from megacore.data.loading.loader import BatchLoader, DeviceLoader, Microbatch
from megacore.optim.lr_schedules import learning_rate
from megacore.optim.optimizers import state_kinds
from megacore.optim.update import WeightUpdate
from megacore.parallel.collectives import all_reduce_, start_all_reduce_
from megacore.parallel.mesh import Mesh
from megacore.pipeline.partition import stage_ranges
from megacore.plan.flops import CONVENTION, flops_per_sequence
from megacore.plan.memory import fullest_state, plan_memory
from megacore.plan.peaks import Format, peak_tflops
from megacore.plan.simulator import Costs, simulate
from megacore.train.clock import StepClock
from megacore.train.memory_check import check_memory_of_ranks
from megacore.train.metrics import device_name, evaluation_line, log_line, peak_memory_bytes
from megacore.train.parallelize import Task, parallelize, training_schedule
from megacore.train.saving import Saving
from megacore.train.sinks import Report, say
from megacore.train.stopping import Decision, StopRequests
from megacore.train.summary import launch_summary
from megacore.train.tracing import Tracer
from megacore.zero.memory import measured_bytes


class Trainer:
    """Trains a task on this rank's place of the mesh.

    Args:
        config: resolved.
        mesh: this rank's place.
        task: the model's layers and its loss.
        train_data: training samples; at least train_iters x global_batch_size of them.
        valid_data: validation samples, or None for no evaluation.

    Attributes:
        means, counts: of the last step's loss terms over the global batch, fp64.
        decision: what all ranks do after the last step.
    """

    def __init__(self, config: ResolvedConfig, mesh: Mesh, task: Task, train_data: Any, valid_data: Any | None) -> None:
        self.config, self.mesh, self.task = config, mesh, task
        self.train_data, self.valid_data = train_data, valid_data
        self.bubble_predicted, self.memory_predicted = self._predicted_bubble(), self._predicted_memory()
        self._peak = self._peak_tflops()
        self._announce()
        check_memory_of_ranks(config, mesh, task.layers)
        self.model = parallelize(task, config, mesh)
        self.parameters = self.model.parameters
        self.update = WeightUpdate(
            self.model.data_parallel,
            mesh,
            config,
            shared=self.model.shared,
        )
        self.step, self.consumed_samples = 0, 0
        self.means = self.counts = torch.zeros(task.terms.shape, dtype=torch.float64)
        self.stop_requests, self.decision = StopRequests(config.checkpoint), Decision()
        self.loaded = None if config.checkpoint.load is None else self._restore(Path(config.checkpoint.load))
        self.tracer = Tracer(config, mesh, self.model.runtime, self.step)
        self.batches = DeviceLoader(self._loader(train_data, self.consumed_samples), mesh.device)
        self._first_log = True
        self.valid_batches = None if valid_data is None else self._loader(valid_data, 0)
        self._evaluates = valid_data is not None and config.training.eval_interval > 0
        self.report = Report(
            Path(config.training.output_dir),
            train_iters=config.training.train_iters,
            first_step=self.step,
            quiet=mesh.world.rank != 0,
            may_drop=config.checkpoint.on_save_error == "warn",
        )
        load = config.checkpoint.load
        self.saving = Saving(config, mesh, self.report, loaded=None if load is None else Path(load))

    def run(self) -> None:
        """Train until train_iters or until something asks for an end, evaluating, logging and saving as configured;
        leave the result in the output directory."""
        if self.loaded is not None:
            changes = ", ".join(changed_settings(self.config, self.loaded)) or "nothing"
            self.report.say(f"  {'continues':<10}{self.config.checkpoint.load}, step {self.step}; changed: {changes}")
        with self.stop_requests, self.saving:
            stopped = self._loop(StepClock(self.mesh.device, self.step))
        training = self.config.training
        skipped = f", {self.update.skipped_steps} of them skipped" if self.update.skipped_steps else ""
        samples = f"{self.consumed_samples:,} samples"
        ended = f"stopped by {stopped}: {self.step} of {training.train_iters}" if stopped else f"done: {self.step}"
        self.report.say(f"{ended} steps{skipped}, {samples}; everything lies in {training.output_dir}")
        self.report.close()

    def _loop(self, clock: StepClock) -> str | None:
        """Steps, until the last or until all ranks agree to end; returns why they ended early."""
        training, logging = self.config.training, self.config.logging
        while self.step < training.train_iters and self.decision.stop is None:
            _, norm, rate = self.train_step(next(self.batches))
            self.report.step_done(self.step)
            if _due(self.step, logging.log_interval, training.train_iters):
                self._log(norm, rate, clock.per_step(self.step))
            if self.tracer.is_complete(self.step):
                with clock.paused():
                    self.tracer.write(self._microbatches)
                self.report.say(f"step {self.step}/{training.train_iters} | traced {self.tracer.path}")
            if self._evaluates and _due(self.step, training.eval_interval, training.train_iters):
                with clock.paused():
                    self.evaluate()
            self.saving.go_on(some_rank_waits=self.decision.some_rank_waits)
            last = self.decision.stop is not None or self.step == training.train_iters
            if last or _due(self.step, self.config.checkpoint.save_interval or 0, training.train_iters):
                with clock.paused():
                    self.saving.save(self._state(), is_last=last)
        return self.decision.stop if self.step < training.train_iters else None

    def train_step(self, microbatches: list[Microbatch]) -> tuple[Tensor, Tensor, float]:
        """One update of the weights; what ranks agree on meanwhile is in `decision`.

        An accelerator is waited for once, for the decision to apply the update (optim/update.py). Whatever is added
        here must not wait for it: no `float`, `item` or `tolist` of a tensor on the device, and no tensor made on the
        host and copied there. tests/accelerator/test_synchronizations.py counts.

        Args:
            microbatches: this data-parallel rank's share of the global batch.

        Returns:
            Mean loss of the global batch (the sum of its terms' means) and global gradient norm before clipping, fp64
            scalars that are equal on every rank; learning rate.
        """
        batch = [microbatch.to(self.mesh.device, non_blocking=True) for microbatch in microbatches]
        counts = torch.stack([self.task.terms.counts(microbatch) for microbatch in batch]).sum(0)
        counted = start_all_reduce_(counts, self.mesh.loss)

        def per_count() -> Tensor:
            counted.wait()
            return 1.0 / counts.clamp(min=1.0)

        def loss_scale() -> Tensor:
            return (per_count() * self.update.scaler.scale).float()

        traced = self.tracer.begin(self.step + 1)
        self.model.runtime.timer.enabled = traced or _due(
            self.step + 1, self.config.logging.log_interval, self.config.training.train_iters
        )
        self.model.data_parallel.begin_step(self.update.scaler.scale)
        own_loss = self.model.runtime.train_step(batch, loss_scale, self.model.data_parallel)
        self.batches.prefetch()
        self.step += 1
        self.consumed_samples = self.batches.consumed_samples
        rate = learning_rate(self.step, self.config.optimizer, train_iters=self.config.training.train_iters)
        votes = self.stop_requests.votes(self.step, waiting=self.saving.is_waiting)
        outcome = self.update.apply(own_loss, rate, votes=votes)
        self.decision = self.stop_requests.decision(outcome.votes)
        self.tracer.end(self.step)
        if outcome.skipped is not None:
            self.report.say(f"step {self.step}/{self.config.training.train_iters} | skipped: {outcome.skipped}")
        self.means, self.counts = outcome.loss * per_count(), counts
        return self.means.sum(), outcome.norm, rate

    def evaluate(self) -> float | None:
        """Mean loss (without what only training adds to it, such as label smoothing) over eval_iters global batches of
        the validation data, the same ones every time; None where these have nothing to predict."""
        assert self.valid_batches is not None
        self.valid_batches.rewind()
        terms = self.task.eval_terms or self.task.terms
        sums = torch.zeros(2, *terms.shape, dtype=torch.float64, device=self.mesh.device)  # what is meant, its count
        for _ in range(self.config.training.eval_iters):
            batch = [microbatch.to(self.mesh.device, non_blocking=True) for microbatch in next(self.valid_batches)]
            sums[0] += self.model.runtime.evaluate(batch)
            if self.mesh.pipeline.is_last:
                sums[1] += torch.stack([terms.counts(microbatch) for microbatch in batch]).sum(0)
        all_reduce_(all_reduce_(sums, self.mesh.loss), self.mesh.pipeline)
        losses = len(self.task.terms.names) or None
        found = terms.figures(sums[0] / sums[1].clamp(min=1.0), sums[1], losses=losses)
        figures = {f"eval/{name}": figure for name, figure in found.items()}
        self.report.record({**self._position(), **figures})
        self.report.say(evaluation_line(self.step, figures, self.config.training.train_iters))
        return found["loss"]

    def save(self) -> None:
        """Publish a checkpoint of the current step, and wait for it."""
        self.saving.save(self._state(), is_last=True)

    def _restore(self, directory: Path) -> Manifest:
        manifest = load_checkpoint(directory, self._state(), self.mesh.world)
        self.step, self.consumed_samples = manifest.step, manifest.consumed_samples
        self.update.load_counters(manifest.counters)
        return manifest

    def _state(self) -> TrainingState:
        rate = learning_rate(self.step, self.config.optimizer, train_iters=self.config.training.train_iters)
        return TrainingState(
            step=self.step,
            consumed_samples=self.consumed_samples,
            data_parallel=self.model.data_parallel,
            optimizer=self.update.optimizer,
            kinds=state_kinds(self.config.optimizer),
            counters=self.update.counters() | {"learning_rate": rate},
        )

    def _loader(self, dataset: Any, consumed_samples: int) -> BatchLoader[Any]:
        training = self.config.training
        return BatchLoader(
            dataset,
            self.task.batch_type,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            rank=self.mesh.batch.rank,
            ranks=self.mesh.batch.size,
            consumed_samples=consumed_samples,
            num_workers=self.config.data.num_workers,
            pin_memory=self.mesh.device.type != "cpu",
        )

    def _announce(self) -> None:
        """Say what is about to be built."""
        if self.mesh.world.rank != 0:
            return
        samples = (len(self.train_data), 0 if self.valid_data is None else len(self.valid_data))
        layers = list(self.task.layers)
        stages = stage_ranges(layers, self.config.parallel)
        lines = [
            launch_summary(self.config, self.mesh, layers, stages, samples=samples, idle_share=self.bubble_predicted),
            f"  {'figures':<10}TFLOP/s and MFU count {CONVENTION}{self._about_mfu()}",
            f"  {'memory':<10}MiB of state on the fullest rank, by formula: {_mib(self.memory_predicted)}",
        ]
        say("\n".join(lines), may_fail=self.config.checkpoint.on_save_error == "warn")

    def _log(self, norm: Tensor, rate: float, step_seconds: float) -> None:
        config, training = self.config, self.config.training
        measured = measured_bytes(self.model.data_parallel, self.update.optimizer)
        memory = self._largest({**measured, "peak": float(peak_memory_bytes(self.mesh.device))})
        peak = memory.pop("peak")
        sequences = training.global_batch_size
        flops = self.task.flops or flops_per_sequence(config.model, config.data.seq_length)
        tflops = flops * sequences / step_seconds / self.mesh.world.size / 1e12
        record = {
            **self._position(),
            **{f"train/{name}": figure for name, figure in self.task.terms.figures(self.means, self.counts).items()},
            "train/grad_norm": float(norm),
            "train/lr": rate,
            "perf/step_time_s": step_seconds,
            "perf/tokens_per_sec": sequences * config.data.seq_length / step_seconds,
            "perf/tflops_per_rank": tflops,
            "perf/bubble_predicted": self.bubble_predicted,
            "perf/bubble_measured": self._measured_bubble(),
            "mem/peak_gib": peak / 2**30,
            **{f"mem/{kind}_bytes": int(size) for kind, size in memory.items()},
            **{f"mem/{kind}_bytes_predicted": round(size) for kind, size in self.memory_predicted.items()},
            "train/skipped_steps": self.update.skipped_steps,
        }
        if self.config.precision.precision == "fp16":
            record["train/loss_scale"] = self.update.scaler.scale
        if self._peak is not None:
            record["perf/mfu"] = tflops / self._peak
        self.report.record(record)
        self.report.say(log_line(record, training.train_iters, terms=self.task.terms.names))
        if self._first_log:
            self.report.say(f"  {'memory':<10}MiB of state on the fullest rank, counted: {_mib(memory)}")
        self._first_log = False

    @property
    def _form(self) -> Format:
        """What matrix products multiply."""
        precision = self.config.precision.precision
        return "tf32" if precision == "fp32" and torch.get_float32_matmul_precision() != "highest" else precision

    def _peak_tflops(self) -> float | None:
        """Of this rank's device, as given or by its data sheet."""
        return self.config.logging.peak_tflops or peak_tflops(device_name(self.mesh.device), self._form)

    def _about_mfu(self) -> str:
        name = device_name(self.mesh.device)
        if self._peak is not None:
            return f"; MFU is a share of {self._peak:,g} TFLOP/s ({name}, {self._form})"
        return "" if name == "cpu" else f"; no MFU: {name} is not known in {self._form}, give --peak-tflops"

    def _predicted_bubble(self) -> float:
        """Share of the ranks' time that the schedule leaves them idle, if time goes as operations."""
        layers, parallel = self.task.layers, self.config.parallel
        flops = [sum(layers[i].flops for i in stage) for stage in stage_ranges(layers, parallel)]
        return simulate(training_schedule(parallel, self._microbatches), Costs.proportional(flops)).idle_share

    @property
    def _microbatches(self) -> int:
        """Of a replica in a step."""
        training = self.config.training
        return training.global_batch_size // training.micro_batch_size // self.mesh.batch.size

    def _measured_bubble(self) -> float:
        """Share of the time between a pipeline's first and last computation that its ranks do not compute; the mean."""
        timed, device = self.model.runtime.timer.read(), self.mesh.device
        computed = timed.computations
        ends = torch.tensor([-computed[0].start, computed[-1].end], dtype=torch.float64, device=device)
        window = all_reduce_(ends, self.mesh.pipeline, "max").sum() * self.mesh.pipeline.size
        busy = all_reduce_(torch.tensor(timed.busy_seconds, dtype=torch.float64, device=device), self.mesh.pipeline)
        return float(all_reduce_(1.0 - busy / window, self.mesh.world)) / self.mesh.world.size

    def _predicted_memory(self) -> dict[str, float]:
        on_cpu = self.mesh.device.type == "cpu"
        return fullest_state(plan_memory(self.config, self.task.layers, on_cpu=on_cpu))

    def _largest(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value's maximum over all ranks."""
        numbers = torch.tensor(list(values.values()), dtype=torch.float64, device=self.mesh.device)
        return dict(zip(values, all_reduce_(numbers, self.mesh.world, "max").tolist(), strict=True))

    def _position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_samples * self.config.data.seq_length,
        }


def _mib(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {size / 2**20:,.1f}" for kind, size in sizes.items())


def _due(step: int, interval: int, last: int) -> bool:
    """At every interval and at the end; an interval of 0 means at the end only."""
    return step == last or (interval > 0 and step % interval == 0)
