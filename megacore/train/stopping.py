"""Early ends and extra saves of a run, for a signal, a time limit or a step, which all ranks agree on at the same step.

Each rank votes for its reason. The votes are summed over ranks together with the loss and the norm of a step, and the
most important reason with a vote decides. A signal is only recorded until then. One that ends the run is recorded once:
the run saves, and ends with status 0. SIGUSR1 asks for a save, after which training continues; those that arrive before
the ranks agree on it are one request.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megacore.config.checkpoint import CheckpointConfig

ENDING = (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM)
_SAVE = signal.SIGUSR1
_DURATION, _INTERVAL, _REQUEST = "duration", "interval", "request"
_REASONS: tuple[signal.Signals | str, ...] = (*ENDING, _DURATION, _INTERVAL, _REQUEST)  # the most important last


def prepare_signals() -> None:
    """Say what signals do until training handles them. A program calls this first: loading torch takes seconds. SIGINT
    ends it without a traceback from every rank. SIGUSR1 asks for a save, for which there is nothing yet: it must not
    end the rank."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if signal.getsignal(_SAVE) is signal.SIG_DFL:
        signal.signal(_SAVE, _pass)  # SIG_IGN would mean that somebody wants it to be ignored later too


def _pass(number: int, frame: FrameType | None) -> None:
    """Does nothing."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do after a step."""

    stop: str | None = None  # why the run ends now, or None
    some_rank_waits: bool = False  # whether a rank is not ready yet to agree on a save
    save: bool = False  # whether a rank was asked to save now


class StopRequests:
    """Requests to this rank to end the run or to save; inside this context signals are such requests. SIGINT, SIGTERM
    and SIGUSR2 end the run, SIGUSR1 saves. After one that ends the run the handlers stay: a second signal must not end
    the process in another way. `options`: when the run ends early."""

    def __init__(self, options: CheckpointConfig) -> None:
        self._options = options
        self._signal = 0
        self._save = False
        self._request: str | None = None
        self._start = time.monotonic()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in (*ENDING, _SAVE) if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._signal:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == _SAVE:
            self._save = True
        else:
            self._signal = self._signal or number

    def request(self, reason: str) -> None:
        """End the run after the next step; the first reason is reported."""
        self._request = self._request or reason

    def votes(self, step: int, *, waiting: bool) -> list[int]:
        """This rank's votes, which are summed over ranks in a step. `waiting`: whether this rank is not ready yet to
        agree on a save. Returns 0 or 1 for each reason to stop, then for waiting, then for a save."""
        local_reason = self._reason(step)
        return [*(int(reason == local_reason) for reason in _REASONS), int(waiting), int(self._save)]

    def decision(self, votes: Sequence[int]) -> Decision:
        """The decision from the summed votes. A save that is agreed on answers the requests until now."""
        *counts, waiting, save = votes
        if save:
            self._save = False
        voted = [reason for reason, count in zip(_REASONS, counts, strict=True) if count]
        return Decision(stop=self._text(voted[-1]) if voted else None, some_rank_waits=waiting > 0, save=save > 0)

    def _reason(self, step: int) -> signal.Signals | str | None:
        minutes = self._options.exit_duration_minutes
        if self._signal:
            return signal.Signals(self._signal)
        if self._request is not None:
            return _REQUEST
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return _DURATION
        if self._options.exit_interval is not None and step % self._options.exit_interval == 0:
            return _INTERVAL
        return None

    def _text(self, reason: signal.Signals | str) -> str:
        if isinstance(reason, signal.Signals):
            return reason.name
        if reason == _REQUEST:
            return self._request or "a callback of another rank"
        if reason == _DURATION:
            return f"--exit-duration-minutes {self._options.exit_duration_minutes:g}"
        return f"--exit-interval {self._options.exit_interval}"
