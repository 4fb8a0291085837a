"""When a run ends early, by agreement: a signal, a time limit or a step, of which all ranks learn at the same step.

Each rank may have its own reason; one number, the largest of all ranks', is the decision. A signal is only noted while
training goes on, and a second one changes nothing: the run saves, and ends with status 0.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from megacore.config.checkpoint_section import CheckpointConfig
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DURATION, _INTERVAL = 1001, 1002  # beyond the numbers of signals


class StopRequests:
    """What asks this rank to end the run; a context in which SIGINT and SIGTERM are requests.

    After one has come it stays so at the end of the context: a second one must not end the process in another way.

    Args:
        options: when the run ends early.
        mesh: this rank's place.
    """

    def __init__(self, options: CheckpointConfig, mesh: Mesh) -> None:
        self._options, self._mesh = options, mesh
        self._signal = 0
        self._start = time.monotonic()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._signal:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def agreed(self, step: int, *, waiting: Callable[[], bool]) -> tuple[str | None, bool]:
        """What all ranks do after a step; every rank calls it.

        Args:
            step: that is done.
            waiting: whether this rank still has something to do before ranks can agree on a save.

        Returns:
            Why the run ends now, or None; and whether some rank is waiting. The same on every rank.
        """
        code = torch.tensor([self._reason(step), int(waiting())], dtype=torch.int64, device=self._mesh.device)
        reason, some_wait = all_reduce_(code, self._mesh.world, "max").tolist()
        return self._text(reason), bool(some_wait)

    def _reason(self, step: int) -> int:
        minutes = self._options.exit_duration_minutes
        if self._signal:
            return self._signal
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return _DURATION
        if self._options.exit_interval is not None and step % self._options.exit_interval == 0:
            return _INTERVAL
        return 0

    def _text(self, reason: int) -> str | None:
        if reason == _DURATION:
            return f"--exit-duration-minutes {self._options.exit_duration_minutes:g}"
        if reason == _INTERVAL:
            return f"--exit-interval {self._options.exit_interval}"
        return signal.Signals(reason).name if reason else None
