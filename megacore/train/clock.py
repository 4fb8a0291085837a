"""How long steps take, as reported: on the wall clock, and without what is no part of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megacore.train.metrics import synchronize


class StepClock:
    """Seconds per step since the last look, without what happened while paused.

    A look and a pause wait until an accelerator is done with the steps before: its work would else be counted where it
    is waited for.

    Args:
        device: that computes.
        step: steps done before.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self._device, self._step, self._start = device, step, time.perf_counter()

    def restart(self, step: int) -> None:
        """Count from now on; `step` steps are done."""
        self._step, self._start = step, time.perf_counter()

    def per_step(self, step: int) -> float:
        """Seconds of each of the steps since the last look, the last of which is number `step`."""
        synchronize(self._device)
        now = time.perf_counter()
        seconds = (now - self._start) / max(step - self._step, 1)
        self._step, self._start = step, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside does not count; pauses may be nested."""
        synchronize(self._device)
        start, since = self._start, time.perf_counter()
        yield
        self._start = start + time.perf_counter() - since  # inner pauses are part of this one
