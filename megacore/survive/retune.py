"""Other settings while a run trains (`--retune`): it measures its steps, asks the planner which layout, micro-batch or
recomputation could be faster, and trains some steps with each. Nothing is lost by that: they are steps of the run, on
the same batches. Only whole batches are measured, after a ramp. The measured best stays. Each change is a new
generation, as after a failure, from the state in memory; what has been measured goes on in its plan (meeting.py)."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.files import replace_bytes
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import first_status_of_job
from megacore.plan.next_layout import Measured, next_layout
from megacore.plan.plan_json import layout_flags
from megacore.survive.meeting import ASKED, EXIT_ASKS, Plan
from megacore.survive.writer import StateInMemory
from megacore.train.callbacks import Callback, Run
from megacore.train.failures import exit_with
from megacore.train.metrics import device_name
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from megacore.train.watchdog import watchdog

_CHANGED = 1.5  # factor between the times of two steps, which noise alone rarely is
_TUNED = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "zero_stage", "sequence_parallel", "offload_optimizer"),
    *("schedule", "virtual_stages", "pipeline_balance", "pipeline_layout"),
    *("micro_batch_size", "recompute", "recompute_num_layers"),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings that are tried.

    Attributes:
        values: of `_TUNED`, by field.
        expected: seconds of a step, by the planner; of the settings with which a round begins as measured.
        seconds: of a step, the measured median.
    """

    values: dict[str, Any]
    expected: float
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a generation asks for before it ends: the next one, with these parts of its plan (meeting.py)."""

    cause: str
    values: dict[str, Any]
    fallback: dict[str, Any] | None = None
    tuning: dict[str, Any]


class Retune(Callback):
    """Tries other settings, and keeps the best; all ranks do the same, as rank 0 decides.

    Args:
        trainer: of this generation.
        plan: its plan.
        state: what keeps its state in memory.
        directory: where the keepers look for what it asks for.
    """

    def __init__(self, trainer: Trainer, plan: Plan, state: StateInMemory, directory: Path) -> None:
        self._trainer, self._plan, self._state, self._directory = trainer, plan, state, directory
        self._seconds, self._begun = list[float](), 0.0
        self._switching = time.time() - plan.at  # seconds that a change takes, without its first step
        self._usual: float | None = None  # seconds of a step with settings that stay; None: they are being measured

    def on_step_begin(self, run: Run, step: int) -> None:
        watch = self._trainer.config.watch
        # The first step of a generation also allocates, and does not count.
        wanted = watch.retune_after + 1 if self._usual is None else max(watch.retune_every, watch.retune_after)
        if len(self._seconds) >= wanted and self._state.keep():
            with run.unclocked():
                asked = None
                if run.mesh.world.is_first:
                    self._usual, asked = self._decided(statistics.median(self._seconds[-watch.retune_after :]))
                self._usual, asked = all_gather_objects((self._usual, asked), run.mesh.world)[0]
                self._seconds.clear()
                if asked is not None:
                    self._leave(asked)
        self._begun = time.perf_counter()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        sizes = self._trainer.config.batch_sizes
        if sizes.of_step(result.step) == sizes.full:  # others take another time
            self._seconds.append(time.perf_counter() - self._begun)
        if self._trainer.is_done and self._usual is None:  # the sinks close before this is told that the run stops
            tried, failed = self._round()
            if tried := [trial for trial in tried if trial.seconds]:
                self._tell(tried, failed, would=True)
            elif self._plan.tuning is None:
                steps = f"{self._trainer.config.watch.retune_after + 1} steps of a whole batch"
                run.say(f"  {'retune':<10}tried nothing: the run ends before {steps} are measured")

    def _round(self) -> tuple[list[Trial], list[dict[str, Any]]]:
        """The trials of the round, and the values that have failed in the run."""
        tuning = self._plan.tuning or {"tried": [], "failed": []}
        return [Trial(**trial) for trial in tuning["tried"]], tuning["failed"]

    def _decided(self, seconds: float) -> tuple[float | None, Asked | None]:
        """What follows from the time of a step: the usual one from now on, or what to try next."""
        tried, failed = self._round()
        if self._usual is not None:
            if 1 / _CHANGED < seconds / self._usual < _CHANGED:
                return self._usual, None
            tried = []
        elif self._plan.tuning is not None and not tried:  # the best of a round that is over
            return seconds, None
        config, running = self._trainer.config, None
        if not tried:
            tried.append(Trial(values=_tuned(config), expected=seconds))
        if not tried[-1].seconds:  # else another has failed, and the best trains
            running = tried[-1] = replace(tried[-1], seconds=seconds)
        best = min(tried, key=lambda trial: trial.seconds)
        following = None
        if len(tried) + len(failed) <= config.watch.retune_settings and self._left > config.watch.retune_after + 1:
            measured = [Measured(config=config.with_values(one.values), seconds=one.seconds) for one in tried]
            following = next_layout(
                measured,
                device_name=device_name(self._trainer.mesh.device),
                failed=[config.with_values(values) for values in failed],
            )
        if following is not None:
            trial = Trial(values=_tuned(following.config), expected=following.seconds)
            cause = f"--retune tries {layout_flags(following.config)}, {trial.expected:.3g} s a step expected"
            tuning = {"tried": [asdict(one) for one in (*tried, trial)], "failed": failed}
            return None, Asked(cause=cause, values=trial.values, fallback=best.values, tuning=tuning)
        running = running or best
        # To go back is to save more than it takes.
        stays = best is running or (running.seconds - best.seconds) * self._left < self._switching
        self._tell(tried, failed, would=stays and best is not running)
        if stays:
            return seconds, None
        cause = f"--retune takes {self._flags(best)}"
        return None, Asked(cause=cause, values=best.values, tuning={"tried": [], "failed": failed})

    @property
    def _left(self) -> int:
        return self._trainer.config.training.train_iters - self._trainer.step

    def _tell(self, tried: Sequence[Trial], failed: Sequence[dict[str, Any]], *, would: bool) -> None:
        """What a round has found. `would`: the run ends too early for it."""
        before, *others = tried
        best = min(tried, key=lambda trial: trial.seconds)
        gain = 1 - best.seconds / before.seconds
        text = f"{'would stay' if would else 'stays'} with {self._flags(before)}, {before.seconds:.3g} s a step"
        if best is not before:
            text = f"{'would take' if would else 'takes'} {self._flags(best)}, {best.seconds:.3g} s a step, "
            text += f"expected {best.expected:.3g}; {gain:.0%}"
            text += f" less than the {before.seconds:.3g} s of {self._flags(before)}"
        elif others:
            second = min(others, key=lambda trial: trial.seconds)
            text += (
                f": the best of {counted(len(others), 'other')}, {self._flags(second)}, took {second.seconds:.3g} s, "
            )
            text += f"expected {second.expected:.3g}"
        elif self._left <= self._trainer.config.watch.retune_after + 1:
            text += ": too few steps are left to try others"
        else:
            text += ": the planner expects nothing faster"
        if failed:
            text += f"; {counted(len(failed), 'other')} failed"
        trials = [{"flags": self._flags(one), "expected": one.expected, "seconds": one.seconds} for one in tried]
        self._trainer.emit("retune", flags=self._flags(best), gain=gain, trials=trials)
        self._trainer.say(f"  {'retune':<10}{text}")

    def _flags(self, trial: Trial) -> str:
        return layout_flags(self._trainer.config.with_values(trial.values))

    def _leave(self, asked: Asked) -> None:
        """End this generation on all ranks at once, without a word."""
        world = self._trainer.mesh.world
        self._trainer.saving.finish()
        self._state.on_stop(self._trainer, None)
        replace_bytes(self._directory / ASKED, json.dumps(asdict(asked)).encode(), durable=False)
        if world.is_first:
            first_status_of_job(EXIT_ASKS)  # that the others end is no death that one would have to report
        with contextlib.suppress(RuntimeError):  # who is through has ended
            barrier(world)
        watchdog().end()
        exit_with(EXIT_ASKS)


def _tuned(config: ResolvedConfig) -> dict[str, Any]:
    return {name: config.value(name) for name in _TUNED}
