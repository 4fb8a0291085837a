"""Writes to a tracker in a thread, so that a slow or broken one costs the training nothing but its records. The queue
is bounded: while it is full, new records are left out. A tracker that fails is reported once. What it did not get is
counted, and is still in metrics.jsonl."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megacore.config.messages import counted
from megacore.observe.sinks import Sink
from megacore.observe.trackers.csv_file import CsvFile
from megacore.observe.trackers.tensorboard import TensorBoard
from megacore.observe.trackers.tracker import RunInfo, Tracker
from megacore.observe.trackers.wandb_run import WandbRun
from megacore.train.callbacks import Event

MOST_WAITING = 1000
"""Records that may wait for a slow tracker."""


def warn(text: str) -> None:
    """Print a warning on stderr, from any thread."""
    print(f"megacore: warning: {text}", file=sys.stderr, flush=True)


def background_sinks(run: RunInfo) -> list[Sink]:
    """The trackers that the configuration chooses, each in its thread."""
    logging = run.config.logging
    trackers: list[Tracker] = []
    if logging.csv:
        trackers.append(CsvFile())
    if logging.tensorboard_dir is not None:
        trackers.append(TensorBoard(Path(logging.tensorboard_dir)))
    if logging.wandb_project is not None:
        trackers.append(WandbRun(logging))
    return [Background(tracker, run) for tracker in trackers]


class Background(Sink):
    """A tracker with its thread, which alone uses it."""

    def __init__(self, tracker: Tracker, run: RunInfo, say: Callable[[str], None] = warn) -> None:
        self._tracker, self._run, self._say = tracker, run, say
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a tracker that hangs in the network must not keep the process when the run is over.
        self._thread = threading.Thread(target=self._work, name=f"tracker {tracker.flag}", daemon=True)
        self._started = self._failed = self._is_open = False
        self._lost = 0

    def take(self, event: Event) -> None:
        """Pass a record on, or leave it out if too many wait; returns at once."""
        if not self._started:  # not before the first step, in which the workers that load data are forked
            self._started = True
            self._thread.start()
        # Dropped, not waited for: metrics.jsonl has every record, and a step must not wait for a server.
        if self._waiting.qsize() >= MOST_WAITING:
            if not self._lost:
                self._say(f"{self._tracker.flag} is too slow: records are left out (all are in metrics.jsonl)")
            self._lost += 1
        else:
            self._waiting.put(partial(self._tracker.write, event.values))

    def rewind(self, step: int) -> None:
        """Let the tracker drop the records after a step; returns at once."""
        if self._started:
            self._waiting.put(partial(self._tracker.rewind, step))

    def close(self, *, failed: bool, until: float) -> None:
        """Let the tracker write what waits, and close it."""
        if not self._started:
            return
        self._failed = failed
        # Behind all that waits, so that it is written first.
        self._waiting.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            left = counted(self._waiting.qsize(), "record")
            self._say(f"{self._tracker.flag} has not finished in time, {left} may be missing; the run ends without it")
        elif self._lost:
            self._say(f"{self._tracker.flag} lacks {counted(self._lost, 'record')}, which metrics.jsonl has")

    def _work(self) -> None:
        self._is_open = self._tried(lambda: self._tracker.open(self._run), "cannot be opened")
        while (act := self._waiting.get()) is not None:
            if not (self._is_open and self._tried(act, "failed")):
                self._lost += 1
        if self._is_open:
            self._tried(lambda: self._tracker.close(failed=self._failed), "cannot be closed")

    def _tried(self, action: Callable[[], None], problem: str) -> bool:
        """Whether it succeeded; its first failure is reported."""
        try:
            action()
        except BaseException as error:  # wandb raises SystemExit too
            if not self._lost:
                words = " ".join(str(error).split())[:200]
                self._say(
                    f"{self._tracker.flag} {problem}: {type(error).__name__}: {words}; "
                    "training continues, and metrics.jsonl has every record"
                )
            return False
        return True
