"""When each computation of a step ran, for the measured bubble; and, while tracing, what happened between them.

An accelerator computes behind the program, which must not wait for it, or the step that is timed would not be like the
others. So a time is an event in the stream that computes, and is read once the step is over. A receive that was posted
ahead of need is under way on another stream, and does not hold that event up before its use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from megacore.pipeline.actions import Action
from megacore.plan.trace import Kind, Timed

_UNTIMED = nullcontext()
Mark = float | torch.Event  # seconds on the wall clock, or a point in the accelerator's work


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """A pass over a schedule; times are seconds on the wall clock.

    Attributes:
        start: when it began.
        end: when it ended.
        actions: what was done, in order.
    """

    start: float
    end: float
    actions: tuple[Timed, ...]

    @property
    def computations(self) -> list[Timed]:
        return [timed for timed in self.actions if timed.kind == "compute"]

    @property
    def busy_seconds(self) -> float:
        """Time of the computations."""
        return sum(timed.end - timed.start for timed in self.computations)


class ActionTimer:
    """Notes what is done in a training step.

    Args:
        device: that computes.

    Attributes:
        enabled: whether computations of the next step are timed.
        tracing: whether transfers are too.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = self.tracing = False
        self._device = device
        self._notes: list[tuple[Kind, tuple[Action, ...], Mark, Mark]] = []
        self._pass: tuple[Mark, Mark] | None = None
        self._is_open = False

    def measure(self, action: Action) -> AbstractContextManager[None]:
        """Times a computation."""
        return self._note("compute", (action,)) if self._is_open else _UNTIMED

    def waiting(self, *actions: Action) -> AbstractContextManager[None]:
        """Times the wait for the arrival of a tensor, or, without an action, for the last sends."""
        return self._note("wait", actions) if self._is_open and self.tracing else _UNTIMED

    def posting(self, actions: Sequence[Action]) -> AbstractContextManager[None]:
        """Times the posting of transfers."""
        return self._note("post", tuple(actions)) if self._is_open and self.tracing else _UNTIMED

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Times a whole pass over a schedule, if enabled, and forgets the one before."""
        self._notes, self._pass = [], None
        if not self.enabled:
            yield
            return
        start, self._is_open = self.mark(), True
        try:
            yield
        finally:
            self._is_open = False
        self._pass = start, self.mark()

    def read(self) -> TimedPass:
        """The last step, which was timed; waits until an accelerator is done with it."""
        assert self._pass is not None, "the last step was not timed"
        marks = [*self._pass, *(mark for _, _, *both in self._notes for mark in both)]
        start, end, *seconds = self._seconds(marks)
        actions = (
            Timed(kind, actions, begin, stop)
            for (kind, actions, _, _), begin, stop in zip(self._notes, seconds[::2], seconds[1::2], strict=True)
        )
        return TimedPass(start=start, end=end, actions=tuple(actions))

    def _note(self, kind: Kind, actions: tuple[Action, ...]) -> AbstractContextManager[None]:
        return _Note(self, kind, actions)

    def note(self, kind: Kind, actions: tuple[Action, ...], start: Mark) -> None:
        """Something that ends now."""
        self._notes.append((kind, actions, start, self.mark()))

    def mark(self) -> Mark:
        """Now; on an accelerator, once it has done what it was asked for until now."""
        if self._device.type == "cpu":
            return time.time()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, marks: Sequence[Mark]) -> list[float]:
        """The marks on the wall clock: events tell how far apart they are, and one whose time is known is added."""
        last = self.mark()
        if isinstance(last, float):
            return [mark for mark in marks if isinstance(mark, float)]
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks if isinstance(mark, torch.Event)]


class _Note:
    """Notes the time of what is done inside; a class because it costs half as much as a generator would."""

    __slots__ = ("_actions", "_kind", "_start", "_timer")

    def __init__(self, timer: ActionTimer, kind: Kind, actions: tuple[Action, ...]) -> None:
        self._timer, self._kind, self._actions = timer, kind, actions

    def __enter__(self) -> None:
        self._start = self._timer.mark()

    def __exit__(self, *_: object) -> None:
        self._timer.note(self._kind, self._actions, self._start)
