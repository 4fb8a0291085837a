"""When each computation of a step ran: for the measured bubble, and for traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megacore.pipeline.actions import Action


@dataclass(frozen=True)
class Timed:
    """An action and its time on the wall clock, in seconds."""

    action: Action
    start: float
    end: float


class ActionTimer:
    """Notes the computations of the current step.

    On an accelerator operators run behind the program, so that the end of each action is waited for while `precise`;
    otherwise its times are when it was issued.
    """

    def __init__(self) -> None:
        self.precise = False
        self.step: list[Timed] = []
        self.seconds = 0.0

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Times what is done inside."""
        start = self._now()
        yield
        self.step.append(Timed(action, start, self._now()))

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Times a whole pass over a schedule, and forgets the one before."""
        self.step = []
        start = self._now()
        yield
        self.seconds = self._now() - start

    @property
    def busy_seconds(self) -> float:
        """Time of the computations noted."""
        return sum(timed.end - timed.start for timed in self.step)

    def _now(self) -> float:
        if self.precise and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.time()
