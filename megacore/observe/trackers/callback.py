"""Passes every record of a run on to the trackers that the configuration chooses, on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megacore.config import LoggingConfig
from megacore.observe.trackers.background import Background, warn
from megacore.observe.trackers.csv_file import CsvFile
from megacore.observe.trackers.tensorboard import TensorBoard
from megacore.observe.trackers.tracker import RunInfo, Tracker
from megacore.observe.trackers.wandb_run import WandbRun
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.rollback import Rollback
from megacore.train.step import StepResult

END_SECONDS, _END_SECONDS_AFTER_ERROR = 60.0, 5.0


def chosen_trackers(logging: LoggingConfig) -> Iterator[Tracker]:
    """The trackers that the configuration chooses."""
    if logging.csv:
        yield CsvFile()
    if logging.tensorboard_dir is not None:
        yield TensorBoard(Path(logging.tensorboard_dir))
    if logging.wandb_project is not None:
        yield WandbRun(logging)


class Trackers(Callback):
    """Feeds trackers, each in a separate thread.

    Args:
        trackers: to feed.
        run: the run that they follow.
        say: prints a warning.
    """

    def __init__(self, trackers: Iterable[Tracker], run: RunInfo, say: Callable[[str], None] = warn) -> None:
        self._members = [Background(tracker, run, say) for tracker in trackers]

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Start the threads: not before the first step, because the workers that load data are forked in it."""
        for member in self._members:
            member.start()

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        """Pass a record on."""
        self.put(record)

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        """Pass a record on."""
        self.put(record)

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Drop the records of the steps that the run takes again."""
        self.rewind(rollback.to_step)

    def on_stop(self, run: Run, reason: str | None) -> None:
        """Close the trackers, and wait for them, but not long."""
        self.finish()

    def on_error(self, run: Run, error: BaseException) -> None:
        """Close the trackers; other ranks wait for this one to end."""
        self.finish(failed=True)

    def put(self, record: Mapping[str, Any]) -> None:
        """Pass a record on to every tracker."""
        for member in self._members:
            member.start()
            member.put(record)

    def rewind(self, step: int) -> None:
        """Let every tracker drop the records after a step, which the run is back at."""
        for member in self._members:
            member.rewind(step)

    def finish(self, *, failed: bool = False) -> None:
        """Close the trackers; all together get a minute, or seconds after an error."""
        until = time.monotonic() + (_END_SECONDS_AFTER_ERROR if failed else END_SECONDS)
        for member in self._members:
            member.finish(failed=failed, until=until)


class EngineTrackers(Callback):
    """Feeds the trackers of an engine, of which its first log knows the step that the run begins with."""

    def __init__(self) -> None:
        self._trackers: Trackers | None = None

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        """Pass a record on."""
        if self._trackers is None:
            directory = Path(run.config.training.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            info = RunInfo(output_dir=directory, first_step=max(run.step - 1, 0), config=run.config)
            self._trackers = Trackers(chosen_trackers(run.config.logging), info)
        self._trackers.put(record)

    def on_event(self, run: Run, event: Event) -> None:
        """Drop the records of the steps after a checkpoint that is loaded."""
        if event.kind == "load" and self._trackers is not None:
            self._trackers.rewind(run.step)

    def on_stop(self, run: Run, reason: str | None) -> None:
        """Close the trackers."""
        if self._trackers is not None:
            self._trackers.finish()
