"""A function that runs foreign code in a process of its own, with limits on a call's time, memory and answer. Limits
within the interpreter would not do: one multiplication can take all memory before Python sees a signal."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar, cast

Answer = TypeVar("Answer")
SECONDS = 5.0
"""Of a processor, that a call may take."""
_MEMORY = 1 << 30  # bytes beside those that the process has from its parent
_MOST_BYTES = 1 << 26  # of an answer


class LimitExceeded(Exception):
    """A call took more than it may; the message says of what."""


class Bounded(Generic[Answer]):
    """A function of picklable values. Each process that calls it gets one for it at the first call, which ends with
    it."""

    def __init__(self, function: Callable[..., Answer]) -> None:
        self._function = function
        self._owner: int | None = None  # the process that the connection belongs to

    def __reduce__(self) -> tuple[type[Bounded[Answer]], tuple[Callable[..., Answer]]]:
        return Bounded, (self._function,)

    def __call__(self, *values: Any) -> Answer:
        """The function of the values. Raises LimitExceeded where the call took more than it may; ValueError where the
        function raised something, whose message it has."""
        # A fork of this process has the connection too, and would take answers to the other's questions.
        if self._owner != os.getpid():
            self._start()
        try:
            self._connection.send(values)
            raised, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._owner = None
            self._process.join()
            if self._process.exitcode == -signal.SIGPROF:
                raise LimitExceeded(f"takes more than {SECONDS:g} s") from None
            raise LimitExceeded("needs too much memory, or ended its process") from None
        if raised is not None:
            raise raised(answer)
        return cast(Answer, answer)

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("fork" if os.uname().sysname == "Linux" else "spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._function, theirs, self._connection), daemon=True)
        self._process.start()
        theirs.close()
        self._owner = os.getpid()


def _serve(function: Callable[..., Any], connection: Connection, parents: Connection) -> None:
    """Answer calls until the parent has gone, which ends this process where it closes its end of the connection."""
    # The fork has copied it; while it is open here, the parent's end would go unnoticed.
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it for both
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as status:  # Linux has it
        held = int(status.read().split()[0]) * resource.getpagesize()
        # The limit also counts what the fork shares with its parent.
        resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            values = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, whatever it is doing
            answer = _answer(function, values)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)


def _answer(function: Callable[..., Any], values: tuple[Any, ...]) -> memoryview:
    """What is raised, or None, and the answer or the message, as the connection sends them."""
    try:
        answer = ForkingPickler.dumps((None, function(*values)))
    except MemoryError:
        return ForkingPickler.dumps((LimitExceeded, f"needs more than {_MEMORY >> 20:,} MiB"))
    except Exception as error:
        return ForkingPickler.dumps((ValueError, str(error)))
    if len(answer) > _MOST_BYTES:
        return ForkingPickler.dumps((LimitExceeded, f"writes {len(answer):,} bytes, more than {_MOST_BYTES:,}"))
    return answer
