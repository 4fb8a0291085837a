"""Other settings while a run trains (`--retune`): it measures its steps, asks the planner which layout, micro-batch or
recomputation could be faster, and trains some steps with each. Nothing is lost by that: they are steps of the run, on
the same batches. Only whole batches are measured, after a ramp. The measured best stays. Each change is a new
generation, as after a failure, from the state in memory; what has been measured goes on in its plan (meeting.py)."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.files import replace_bytes
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import first_status_of_job
from megacore.plan.next_layout import TUNED, Measured, next_layout
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
_RIVALS = 1.1  # the same, which it may be


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings that are tried.

    Attributes:
        values: of `TUNED`, by field.
        expected: seconds of a step, by the planner; of the settings with which a round begins as measured.
        seconds: of a step, the median as last measured.
        visits: how often it was measured.
    """

    values: dict[str, Any]
    expected: float
    seconds: float = 0.0
    visits: int = 0


def to_visit_again(tried: Sequence[Trial]) -> list[Trial]:
    """Those of the best two that are to be measured a second time, where noise may have told them apart: the machine
    may have changed between their first visits, and the second ones follow on one another."""
    best, *others = sorted(tried, key=lambda trial: trial.seconds)
    rivals = [best, *(one for one in others[:1] if one.seconds < _RIVALS * best.seconds)]
    return [one for one in rivals if one.visits == 1 and len(rivals) > 1]


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
        fixed: values that stay, by field.
    """

    def __init__(
        self, trainer: Trainer, plan: Plan, state: StateInMemory, directory: Path, fixed: Mapping[str, Any]
    ) -> None:
        self._trainer, self._plan, self._state, self._directory = trainer, plan, state, directory
        self._fixed, tuning = fixed, plan.tuning or {"tried": [], "failed": []}
        self._tried = [Trial(**trial) for trial in tuning["tried"]]  # of the round
        self._failed: list[dict[str, Any]] = tuning["failed"]  # in the run
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
            self._tried = [trial for trial in self._tried if trial.visits]
            if self._tried:
                self._tell(would=True)
            elif self._plan.tuning is None:
                steps = f"{self._trainer.config.watch.retune_after + 1} steps of a whole batch"
                run.say(f"  {'retune':<10}tried nothing: the run ends before {steps} are measured")

    def _decided(self, seconds: float) -> tuple[float | None, Asked | None]:
        """What follows from the time of a step: the usual one from now on, or what to try next; neither, where these
        settings are measured once more."""
        if self._usual is not None:
            if 1 / _CHANGED < seconds / self._usual < _CHANGED:
                return self._usual, None
            self._tried = []
        elif self._plan.tuning is not None and not self._tried:  # the best of a round that is over
            return seconds, None
        config, after = self._trainer.config, self._trainer.config.watch.retune_after
        values = _tuned(config)
        if not self._tried:
            self._tried = [Trial(values=values, expected=seconds)]
        at = [one.values for one in self._tried].index(values)
        running = replace(self._tried[at], seconds=seconds, visits=self._tried[at].visits + 1)
        self._tried[at] = running
        best = min(self._tried, key=lambda trial: trial.seconds)
        again = sorted(to_visit_again(self._tried), key=lambda one: one.values == values)
        may_try = len(self._tried) + len(self._failed) <= config.watch.retune_settings and self._left > after + 1
        if may_try and (following := self._following()) is not None:
            trial = Trial(values=_tuned(following.config), expected=following.seconds)
            said = f"tries {self._flags(trial)}, {trial.expected:.3g} s a step expected"
            return None, self._asked(said, trial, fallback=best.values, tried=[*self._tried, trial])
        if again and self._left > len(again) * (after + 1):
            if again[0].values == values:
                return None, None
            return None, self._asked(f"measures {self._flags(again[0])} again", again[0], tried=self._tried)
        # To go back is to save more than it takes.
        stays = best.values == values or (running.seconds - best.seconds) * self._left < self._switching
        self._tell(would=stays and best.values != values)
        return (seconds, None) if stays else (None, self._asked(f"takes {self._flags(best)}", best, tried=[]))

    def _following(self) -> Measured | None:
        """What the planner would try next."""
        config = self._trainer.config
        return next_layout(
            [Measured(config=config.with_values(one.values), seconds=one.seconds) for one in self._tried],
            device_name=device_name(self._trainer.mesh.device),
            failed=[config.with_values(values) for values in self._failed],
            fixed=self._fixed,
        )

    def _asked(
        self, said: str, trial: Trial, *, tried: Sequence[Trial], fallback: dict[str, Any] | None = None
    ) -> Asked:
        """The next generation, with these settings."""
        tuning = {"tried": [asdict(one) for one in tried], "failed": self._failed}
        return Asked(cause=f"--retune {said}", values=trial.values, fallback=fallback, tuning=tuning)

    @property
    def _left(self) -> int:
        return self._trainer.config.training.train_iters - self._trainer.step

    def _tell(self, *, would: bool) -> None:
        """What a round has found. `would`: the run ends too early for it."""
        before, *others = tried = self._tried
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
        if self._failed:
            text += f"; {counted(len(self._failed), 'other')} failed"
        trials = [{"flags": self._flags(one), "expected": one.expected, "seconds": one.seconds} for one in tried]
        self._trainer.emit("retune", flags=self._flags(best), values=best.values, gain=gain, trials=trials)
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
    return {name: config.value(name) for name in TUNED}
