"""What a step reports: one record with full-precision numbers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.dimensions import pipeline_dimension
from megacore.optim.update import WeightUpdate
from megacore.parallel.collectives import rows_of_ranks
from megacore.parallel.mesh import Mesh, multiplies_in_tf32
from megacore.pipeline.layer_time import layer_seconds
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.runtime import TimedPass
from megacore.pipeline.schedule_file import training_schedule
from megacore.pipeline.simulator import Costs, simulate
from megacore.train.peaks import Format, peak_tflops
from megacore.train.planning import planner
from megacore.train.step import StepResult
from megacore.train.task import Task
from megacore.zero.memory import measured_bytes


class StepTimes(NamedTuple):
    """Times of the steps since the last record, on this rank."""

    seconds: float  # per step, on average
    data_share: float = 0.0  # share of it in which the program waited for data


class StepClock:
    """Seconds per step on the wall clock, without the time while it was paused for logging, evaluation and saving.
    `read` and `paused` first wait for an accelerator, so that its work counts in the step that queued it."""

    def __init__(self, device: torch.device, step: int) -> None:
        self._device = device
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from now on; `step` steps are done, and no new data were waited for."""
        self._step, self._start, self._waited = step, time.perf_counter(), 0.0

    def read(self, step: int, waited: float) -> StepTimes:
        """The times of the steps since the last call. `waited`: seconds of waiting for data since `restart`."""
        synchronize(self._device)
        now = time.perf_counter()
        seconds, waiting = now - self._start, waited - self._waited
        times = StepTimes(seconds / max(step - self._step, 1), min(waiting / max(seconds, 1e-9), 1.0))
        self._step, self._start, self._waited = step, now, waited
        return times

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count; may be nested."""
        synchronize(self._device)
        start, since = self._start, time.perf_counter()
        yield
        self._start = start + time.perf_counter() - since  # inner pauses are part of this one


class StepMetrics:
    """The figures of a run: what is predicted before it, and the record of a logged step."""

    def __init__(self, config: ResolvedConfig, mesh: Mesh, task: Task) -> None:
        self._config, self._mesh, self._task = config, mesh, task
        # Share of the ranks' time that the schedule leaves them idle, if time goes as operations.
        self.predicted_bubble = self._predict_bubble()
        on_cpu = mesh.device.type == "cpu"
        predicted = planner().predicted_memory(config, task.layers, mesh.pipeline.rank, on_cpu=on_cpu)
        # `predicted_peak`: bytes that this rank is expected to take at its peak; None: not known.
        # `predicted_memory`: bytes of state on the fullest rank, by kind and formula; none without a planner.
        self.predicted_memory, self.predicted_peak = predicted
        given = config.logging.peak_tflops
        self._peak_tflops = given or peak_tflops(device_name(mesh.device), self._format)

    def record(self, result: StepResult, times: StepTimes, timed: TimedPass, update: WeightUpdate) -> dict[str, Any]:
        """The figures of a step by the keys of metrics.jsonl, equal on every rank; all ranks call this together.
        `times`: how long a step took, on average since the last record. `timed`: when the step's computations ran.
        `update`: the optimizer and the state that it works on."""
        config, mesh, task = self._config, self._mesh, self._task
        measured = measured_bytes(update.data_parallel, update.optimizer)
        peak_here = float(peak_memory_bytes(mesh.device))
        first, last = timed.computations[0].start, timed.computations[-1].end
        own = (times.seconds, times.data_share, peak_here, *measured.values())
        everyone = rows_of_ranks((first, last, timed.busy_seconds, *own), mesh).cpu()
        step_seconds, data_share, peak, *memory = everyone[:, 3:].amax(0).tolist()
        sequences = config.training.global_batch_size
        if config.rampup.rampup_batch_size:
            sequences = config.batch_sizes.of_step(result.step)
        tflops = task.flops_per_sequence() * sequences / step_seconds / mesh.world.size / 1e12
        means = term_means(task.loss_names, result.means, result.counts, losses=task.main_losses)
        record = {
            **{f"train/{name}": mean for name, mean in means.items()},
            "train/grad_norm": float(result.grad_norm),
            "train/lr": result.lr,
            **({"train/global_batch_size": sequences} if config.rampup.rampup_batch_size else {}),
            "perf/step_time_s": step_seconds,
            "perf/tokens_per_sec": sequences * config.data.seq_length / step_seconds,
            "perf/tflops_per_rank": tflops,
            "perf/data_wait_fraction": data_share,
            "perf/bubble_predicted": self.predicted_bubble,
            "perf/bubble_measured": self._measured_bubble(everyone[:, :3]),
            "mem/peak_gib": peak / 2**30,
            **{f"mem/{kind}_bytes": int(size) for kind, size in zip(measured, memory, strict=True)},
            **{f"mem/{kind}_bytes_predicted": round(size) for kind, size in self.predicted_memory.items()},
            "train/skipped_steps": update.skipped_steps,
        }
        if config.spikes.on_spike != "none":
            record["train/spikes"] = update.guard.total
        if config.optimizer.clip_grad_adaptive:
            record["train/clip_limit"] = result.clip_limit
        if config.precision.precision == "fp16":
            record["train/loss_scale"] = update.scaler.scale
        if self._peak_tflops is not None:
            record["perf/mfu"] = tflops / self._peak_tflops
        return record

    def about_mfu(self) -> str:
        """What MFU is a share of, or why there is none; empty on a CPU."""
        name = device_name(self._mesh.device)
        if self._peak_tflops is not None:
            return f"; MFU is a share of {self._peak_tflops:,g} TFLOP/s ({name}, {self._format})"
        return "" if name == "cpu" else f"; no MFU: {name} is not known in {self._format}, give --peak-tflops"

    @property
    def _format(self) -> Format:
        precision = self._config.precision.precision
        return "tf32" if precision == "fp32" and multiplies_in_tf32() else precision

    def _predict_bubble(self) -> float:
        layers, config = self._task.layers, self._config
        seconds = [layer_seconds(config, layer) for layer in layers]
        times = [sum(seconds[i] for i in stage) for stage in stage_ranges(layers, config)]
        schedule = training_schedule(config.parallel, config.microbatches)
        return simulate(schedule, Costs.proportional(times)).idle_share

    def _measured_bubble(self, everyone: Tensor) -> float:
        """Share of the time between a pipeline's first and last computation that its ranks do not compute; the mean.
        `everyone`: [ranks, 3]: seconds when each rank's first computation began and its last ended, and how many it
        computed."""
        degrees = self._mesh.degrees
        stages = list(degrees).index(pipeline_dimension(self._mesh.dimensions))
        first, last, busy = everyone.view(*degrees.values(), 3).unbind(-1)
        windows = last.amax(stages) - first.amin(stages)
        return float((1.0 - busy.mean(stages) / windows).mean())


def term_means(
    names: Sequence[str], means: Tensor, counts: Tensor, *, losses: int | None = None
) -> dict[str, float | None]:
    """What is reported of a global batch: `loss`, and every mean by its name; None where nothing was counted.

    Args:
        names: of the means; none where there is one, a scalar.
        means: 0 where there is nothing to count.
        counts: of the whole global batch.
        losses: how many of the means, from the first, add up to the loss; None: all.
    """
    pairs = zip(means.reshape(-1).tolist(), counts.reshape(-1).tolist(), strict=True)
    values = [mean if count else None for mean, count in pairs]
    counted = [mean for mean in values[:losses] if mean is not None]
    return {"loss": sum(counted) if counted else None, **dict(zip(names, values, strict=False))}


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the accelerator, or resident in this process on a CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def synchronize(device: torch.device) -> None:
    """Wait for the accelerator, so that a clock read after this means something."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """The accelerator's name as its driver reports it; `cpu` on a CPU."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
