"""Where records go: metrics.jsonl always, a line to read, a progress bar on a terminal; all on rank 0 only."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megacore.checkpoint import Saved, WriterLock, lock_again
from megacore.errors import StorageError, UserError
from megacore.files import GrowingFile, read_bounded, replace_bytes
from megacore.observe.diagnosis import IMPLAUSIBLE_LOSS
from megacore.observe.summary import summary_line
from megacore.progress import Bars, Progress
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.metrics import evaluation_line, log_line, state_memory_line
from megacore.train.observers import say
from megacore.train.rollback import Rollback
from megacore.train.step import StepResult

MOST_BYTES = 1 << 32
"""Of metrics.jsonl: several million records."""


class Report(Callback):
    """The messages and records of rank 0.

    A fresh run never overwrites the metrics of an earlier one: they are set aside as metrics.jsonl.1, .2 and so on.
    A resumed run appends, and refuses a file with a line that is not a record: dropping it would lose data. If the
    directory is deleted or renamed during the run, it is made again, with its settings, lock and records.

    Args:
        output_dir: directory of metrics.jsonl.
        train_iters: steps of the run, for the bar.
        first_step: steps already done.
        terms: names of the loss's sums, if there are several.
        quiet: say and write nothing (every rank but the first).
        may_drop: a record that cannot be written is left out, and training continues; otherwise this ends the run.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        train_iters: int,
        first_step: int,
        quiet: bool,
        terms: Sequence[str] = (),
        may_drop: bool = False,
    ) -> None:
        self._file: GrowingFile | None = None
        self._lock: WriterLock | None = None  # of the directory that was made again
        self._bar: Progress | None = None
        self._may_drop, self._warned, self._dropped = may_drop, False, 0
        self._train_iters, self._terms, self._is_first_log = train_iters, terms, True
        self._first: tuple[int, float] | None = None  # the first logged step, and when it was
        self._is_implausible = False  # whether a loss was, which is said once
        self._in_spike = False  # whether the last step was one: of several in a row the first is said
        self._logged = self._uncounted = 0  # logged steps, and those without a token that counts for the loss
        if quiet:
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._settings = output_dir / "metrics.jsonl", output_dir / "config.toml"
        self._settings_text = self._settings.read_bytes() if self._settings.is_file() else None
        if first_step == 0:
            set_aside(self._path)
        else:
            keep_until(self._path, first_step)
        self._file = self._open()
        if sys.stderr.isatty():
            self._bar = Progress("training", train_iters, unit="steps", done=first_step)
            self._bar.__enter__()

    # ---- events of the run

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Advance the bar; say why a step is skipped."""
        if self._bar is not None:
            self._bar.reach(result.step)
        if result.skipped is not None:
            cause = [] if result.diagnosis is None else [summary_line("cause", str(result.diagnosis))]
            self.say("\n".join([f"step {result.step}/{self._train_iters} | skipped: {result.skipped}", *cause]))
        if result.spike is not None and result.skipped is None and not self._in_spike:
            self.say(f"warning: step {result.step}/{self._train_iters} | spike: {result.spike} (docs/guides/spikes.md)")
        self._in_spike = result.spike is not None

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        """Record a step, and say it in a line."""
        self.record(record)
        last = self._time_and_eta(record) if self._bar is None else ()
        self.say(log_line(record, self._train_iters, terms=self._terms, last=last))
        if self._is_first_log:
            self.say(state_memory_line(record))
        self._is_first_log = False
        self._logged += 1
        loss = record["train/loss"]
        if loss is not None and loss >= IMPLAUSIBLE_LOSS and not self._is_implausible:
            self._is_implausible = True
            self.say(
                f"warning: the loss {loss:.3g} of step {record['step']} is beyond that of a model that knows nothing: "
                "training has diverged, or the loss is a sum and not a mean"
            )
        if loss is None:
            self._uncounted += 1
            if self._uncounted == 1:
                self.say(
                    f"warning: step {record['step']} has no token that counts for the loss, so it has no gradient: "
                    "check the loss mask and the labels of the training data"
                )

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        """Record an evaluation, and say it in a line."""
        self.record(record)
        self.say(evaluation_line(record, self._train_iters))

    def on_save(self, run: Run, saved: Saved) -> None:
        """Say where the checkpoint is, and what went wrong after it was published."""
        self.say(f"step {saved.step}/{self._train_iters} | saved {saved.path}")
        for note in saved.notes:
            self.say(f"warning: {note}; the checkpoint itself is whole")

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Say so; drop the records of steps that the run takes again."""
        self.say(f"rollback: {rollback} (docs/guides/spikes.md)")
        if self._file is not None:
            self._written(self._file.restore)
            self._file.close()
            keep_until(self._path, rollback.to_step)
            self._file = self._open()
        if self._bar is not None:
            self._bar.reach(rollback.to_step)
        self._first = None

    def on_event(self, run: Run, event: Event) -> None:
        """Say what the run says."""
        if event.kind == "message":
            self.say(event.values["text"])

    def on_stop(self, run: Run, reason: str | None) -> None:
        """Say how many steps had nothing to learn from; close the file and the bar."""
        if self._uncounted:
            self.say(f"warning: {self._uncounted} of {self._logged} logged steps had no token that counts for the loss")
        self.close()

    # ---- output

    def say(self, text: str) -> None:
        if Bars.display is not None:
            Bars.display.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._file is not None:
            say(text, may_fail=self._may_drop)

    def _time_and_eta(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """What a progress bar would show: the time until the end, and the time of day."""
        step, now = record["step"], time.time()
        self._first = self._first or (step, now)
        first_step, first_time = self._first
        per_step = (now - first_time) / (step - first_step) if step > first_step else record["perf/step_time_s"]
        left = timedelta(seconds=round(per_step * (self._train_iters - step)))
        return f"ETA {left}", time.strftime("%m-%d %H:%M:%S", time.localtime(now))

    def record(self, values: Mapping[str, Any]) -> None:
        """Append one JSON object to metrics.jsonl; floats keep their full precision, and null stands for no number.

        Raises:
            StorageError: it cannot be written, and is not to be dropped.
        """
        if self._file is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            line = json.dumps(finite, allow_nan=False) + "\n"
            if not self._written(partial(self._file.append, line.encode())):
                self._dropped += 1

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()
        if self._file is not None:
            self._written(self._file.restore)
            self._written(self._file.sync)
            if self._dropped:
                self.say(f"warning: {self._path} lacks {self._dropped} records, which could not be written")
            self._file.close()
            self._file = None

    def _open(self) -> GrowingFile:
        """The records; where another run has the directory by the time they must be made again, UserError ends this."""

        def lock() -> None:
            self._lock = lock_again(self._path.parent) or self._lock

        return GrowingFile(self._path, before_restoring=lock)

    def _tell_of_restored(self, what: str) -> None:
        directory = self._settings.parent
        if self._settings_text is not None and not self._settings.exists():
            replace_bytes(self._settings, self._settings_text, durable=False)
            what += f", and {self._settings.name}; checkpoints and other files of {directory} are not there any more"
        self.say(f"warning: {what}")

    def _written(self, write: Callable[[], str | None]) -> bool:
        """Whether a write to the file succeeded; warns at the first failure if the run may continue."""
        assert self._file is not None
        try:
            if (restored := write()) is not None:
                self._tell_of_restored(restored)
        except OSError as error:
            problem = f"{self._path}: {error.strerror}"
            if not self._may_drop:
                raise StorageError(problem) from None
            if not self._warned:
                lost = "what cannot be written is left out, and training continues (--on-save-error warn)"
                self.say(f"warning: {problem}; {lost}")
            self._warned = True
            return False
        return True


def keep_until(path: Path, step: int) -> None:
    """Drop what an interrupted run reported after the step that this one resumes from: it will be reported again."""
    if not path.exists():
        return
    try:
        lines = read_bounded(path, MOST_BYTES).splitlines(keepends=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}), so this run cannot append to it: move it away, or use another "
            "--output-dir"
        ) from None
    kept = [
        line
        for number, line in enumerate(lines, start=1)
        if line.endswith(b"\n") and _step_of(line, path, number) <= step
    ]
    try:
        replace_bytes(path, b"".join(kept), durable=False)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        step = None
    if type(step) is not int:
        raise UserError(
            f"{path} line {number} is not a record of a run, so this run cannot append to it: "
            "mend or remove the line, move the file away, or use another --output-dir"
        )
    return step


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run to the first free one of NAME.1, NAME.2 and so on."""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
