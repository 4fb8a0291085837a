"""When each computation of a step ran, for the measured bubble; and, while tracing, what happened between them.

On an accelerator operators run behind the program: in a step that is to be measured, the program waits for the end of
each action, on the stream that computes. It does not wait for the other streams: a receive that was posted ahead of
need is under way on one of them, and must not hold up the computations before its use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from megacore.pipeline.actions import Action
from megacore.plan.trace import Kind, Timed

_UNTIMED = nullcontext()


class ActionTimer:
    """Notes what is done in the current step.

    Attributes:
        precise: whether the end of each action is waited for on an accelerator; else times are when it was issued.
        tracing: whether transfers are noted too.
        step: what was done in the current or last step, in order.
        start: when the step began, in seconds.
        end: when it ended.
    """

    def __init__(self) -> None:
        self.precise = False
        self.tracing = False
        self.step: list[Timed] = []
        self.start = self.end = 0.0

    def measure(self, action: Action) -> AbstractContextManager[None]:
        """Times a computation."""
        return self._note("compute", (action,))

    def waiting(self, *actions: Action) -> AbstractContextManager[None]:
        """Times the wait for the arrival of a tensor, or, without an action, for the last sends."""
        return self._note("wait", actions) if self.tracing else _UNTIMED

    def posting(self, actions: Sequence[Action]) -> AbstractContextManager[None]:
        """Times the posting of transfers."""
        return self._note("post", tuple(actions)) if self.tracing else _UNTIMED

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Times a whole pass over a schedule, and forgets the one before."""
        self.step = []
        self.start = self.now()
        yield
        self.end = self.now()

    @property
    def window(self) -> tuple[float, float]:
        """When the first of the computations noted began, and when the last ended."""
        computed = self._computed()
        return computed[0].start, computed[-1].end

    @property
    def busy_seconds(self) -> float:
        """Time of the computations noted."""
        return sum(timed.end - timed.start for timed in self._computed())

    def _computed(self) -> list[Timed]:
        return [timed for timed in self.step if timed.kind == "compute"]

    def _note(self, kind: Kind, actions: tuple[Action, ...]) -> AbstractContextManager[None]:
        return _Note(self, kind, actions)

    def now(self) -> float:
        """Seconds on the wall clock; if precise, once the accelerator has done what it was asked for."""
        if self.precise and torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        return time.time()


class _Note:
    """Notes the time of what is done inside; a class because it costs half as much as a generator would."""

    __slots__ = ("_actions", "_kind", "_start", "_timer")

    def __init__(self, timer: ActionTimer, kind: Kind, actions: tuple[Action, ...]) -> None:
        self._timer, self._kind, self._actions = timer, kind, actions

    def __enter__(self) -> None:
        self._start = self._timer.now()

    def __exit__(self, *_: object) -> None:
        self._timer.step.append(Timed(self._kind, self._actions, self._start, self._timer.now()))
