"""Two computations of a rank that take turns: while one waits for what other ranks send, the other one computes.

DualPipeV hides the exchanges of experts this way (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1): the forward of a
microbatch starts an exchange, and the backward of another one runs until it has started its own. The second one has a
thread of its own, because autograd cannot stop halfway. Only the thread whose turn it is runs. So both compute what
they compute alone, and all ranks post their collectives in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Semaphore, Thread
from typing import Any

import torch
from torch import nn

from megacore.parallel.heartbeat import Current
from megacore.parallel.random import RandomStreams


class Turns:
    """Whose turn it is on this rank. `streams`: of which each computation has its own microbatch and decisions, as it
    is in its own phases."""

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._beside: _Beside | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Run `work` from the first `pause` of this thread on; `finish` must follow."""
        state = self._streams.microbatch, None, _phases()

        def begun() -> None:
            self._continue(*state)
            work()

        self._beside = _Beside(begun, self._streams.device)

    @property
    def has_begun(self) -> bool:
        """Whether the work has run for a while."""
        return self._beside is not None and self._beside.has_begun

    def pause(self) -> None:
        """Let the other computation run until it pauses or ends, if there is one. For what has just started to
        communicate, and will wait for it."""
        if (beside := self._beside) is not None:
            self._without(beside.switch)

    def finish(self) -> None:
        """Run the rest of the work. Raises what it raises, here or in a pause before."""
        assert self._beside is not None
        beside, self._beside = self._beside, None  # nobody is left to pause for
        self._without(beside.finish)

    def _without(self, act: Callable[[], None]) -> None:
        """Let the other computation act, and restore what this one has."""
        state = self._streams.microbatch, self._streams.decided, _phases()
        act()
        self._continue(*state)

    def _continue(self, microbatch: int, decided: dict[nn.Module, Any] | None, phases: Sequence[int]) -> None:
        self._streams.microbatch, self._streams.decided = microbatch, decided
        if phases and Current.heartbeat is not None:
            Current.heartbeat.resume(phases)


def _phases() -> Sequence[int]:
    return () if Current.heartbeat is None else Current.heartbeat.phases()


class _Beside:
    """Work on a thread of its own. `device`: whose current stream it continues in."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self._work = work
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._thread: Thread | None = None
        self._is_its_turn = self._is_done = False
        self._turns = {False: Semaphore(0), True: Semaphore(0)}  # released when it is that one's turn
        self._error: BaseException | None = None

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    def switch(self) -> None:
        """Give the turn to the other thread, and wait until it comes back."""
        if self._is_done:
            return
        mine = self._is_its_turn
        self._is_its_turn = not mine
        if self._thread is None:
            # A daemon: where the first computation fails, nobody gives this one its turn again.
            self._thread = Thread(target=self._run, name="turns", daemon=True)
            self._thread.start()
        else:
            self._turns[not mine].release()
        self._turns[mine].acquire()
        if self._error is not None and not mine:
            raise self._error

    def finish(self) -> None:
        if self._thread is None:
            self._work()
            return
        self.switch()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)  # a thread begins with the first device
            self._work()
        except BaseException as error:
            self._error = error
        self._is_done, self._is_its_turn = True, False
        self._turns[False].release()
