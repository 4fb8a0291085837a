"""The reported time per step: on the wall clock, without logging, evaluation and saving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megacore.train.metrics import synchronize


class StepClock:
    """Seconds per step, without the time while it was paused.

    `per_step` and `paused` first wait for an accelerator, so that its work counts in the step that queued it.

    Args:
        device: that computes.
        step: steps done so far.

    Attributes:
        data_share: share of the steps of the last `per_step` that this rank spent in `fetching`.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self._device, self._step, self._start = device, step, time.perf_counter()
        self._fetching = self.data_share = 0.0

    def restart(self, step: int) -> None:
        """Count from now on; `step` steps are done."""
        self._step, self._start, self._fetching = step, time.perf_counter(), 0.0

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """A context in which the program waits for data."""
        since = time.perf_counter()
        yield
        self._fetching += time.perf_counter() - since

    def per_step(self, step: int) -> float:
        """Seconds per step since the last call; `step` steps are done."""
        synchronize(self._device)
        now = time.perf_counter()
        seconds = (now - self._start) / max(step - self._step, 1)
        self.data_share = min(self._fetching / max(now - self._start, 1e-9), 1.0)
        self._step, self._start, self._fetching = step, now, 0.0
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count; may be nested."""
        synchronize(self._device)
        start, since = self._start, time.perf_counter()
        yield
        self._start = start + time.perf_counter() - since  # inner pauses are part of this one
