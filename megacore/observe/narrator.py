"""What a run says about itself: a line per logged step, evaluation and checkpoint, and warnings."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from megacore.checkpoint import Saved
from megacore.observe.diagnosis import IMPLAUSIBLE_LOSS
from megacore.observe.lines import evaluation_line, log_line, state_memory_line, summary_line
from megacore.progress import Progress
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.rollback import Rollback
from megacore.train.step import StepResult


class Narrator(Callback):
    """Says what happens, on every rank; rank 0 prints it. `terms`: names of the loss's sums, if there are several."""

    def __init__(self, train_iters: int, *, terms: Sequence[str] = ()) -> None:
        self._train_iters, self._terms = train_iters, terms
        self._first: tuple[int, float] | None = None  # the first logged step, and when it was
        self._is_implausible = False  # whether a loss was, which is said once
        self._last_spike: int | None = None  # its step: of several in a row the first is said
        self._logged = self._uncounted = 0  # logged steps, and those without a token that counts for the loss

    def on_event(self, run: Run, event: Event) -> None:
        at, values = f"step {event.step}/{self._train_iters}", event.values
        if event.kind == "skip":
            cause = [summary_line("cause", values["diagnosis"])] if "diagnosis" in values else []
            run.say("\n".join([f"{at} | skipped: {values['reason']}", *cause]))
        elif event.kind == "spike":
            if self._last_spike is None or event.step != self._last_spike + 1:
                run.say(f"warning: {at} | spike: {values['reason']} (docs/guides/spikes.md)")
            self._last_spike = event.step

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        last = () if sys.stderr.isatty() else self._time_and_eta(record)
        run.say(log_line(record, self._train_iters, terms=self._terms, last=last))
        if not self._logged:
            run.say(state_memory_line(record))
        self._logged += 1
        loss = record["train/loss"]
        if loss is not None and loss >= IMPLAUSIBLE_LOSS and not self._is_implausible:
            self._is_implausible = True
            run.say(
                f"warning: the loss {loss:.3g} of step {record['step']} is beyond that of a model that knows nothing: "
                "training has diverged, or the loss is a sum and not a mean"
            )
        if loss is None:
            self._uncounted += 1
            if self._uncounted == 1:
                run.say(
                    f"warning: step {record['step']} has no token that counts for the loss, so it has no gradient: "
                    "check the loss mask and the labels of the training data"
                )

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        run.say(evaluation_line(record, self._train_iters))

    def on_save(self, run: Run, saved: Saved) -> None:
        run.say(f"step {saved.step}/{self._train_iters} | saved {saved.path}")
        for note in saved.notes:
            run.say(f"warning: {note}; the checkpoint itself is whole")

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        run.say(f"rollback: {rollback} (docs/guides/spikes.md)")
        self._first = None

    def on_stop(self, run: Run, reason: str | None) -> None:
        if self._uncounted:
            run.say(f"warning: {self._uncounted} of {self._logged} logged steps had no token that counts for the loss")

    def _time_and_eta(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """What a progress bar would show: the time until the end, and the time of day."""
        step, now = record["step"], time.time()
        self._first = self._first or (step, now)
        first_step, first_time = self._first
        per_step = (now - first_time) / (step - first_step) if step > first_step else record["perf/step_time_s"]
        left = timedelta(seconds=round(per_step * (self._train_iters - step)))
        return f"ETA {left}", time.strftime("%m-%d %H:%M:%S", time.localtime(now))


class Bar(Callback):
    """The steps of a run as a bar on a terminal."""

    def __init__(self, train_iters: int, first_step: int) -> None:
        self._bar = Progress("training", train_iters, unit="steps", done=first_step)
        self._bar.__enter__()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._bar.reach(result.step)

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        self._bar.reach(rollback.to_step)

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._bar.__exit__()
