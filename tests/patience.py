"""How long a test waits: every timeout passes through here, so that a busy or slow machine fails nothing.

A test states how many seconds something takes at most on a quiet machine of the reference speed. `patience` makes the
timeout of it: the seconds times what a fixed computation took at the start beside what it takes on that machine, and
times how much busier this machine has become since.

    subprocess.run(command, timeout=patience(60))
    until(lambda: path.exists(), 30, "no file")
    assert elapsed < patience(2)

What a test really waits for (how long a rank is to be slow, when a hang is to be reported) is `scaled`, without the
margin that a timeout has. The margin is for what no measurement at the start foresees: a disk that stalls, a neighbour
on the same host, a quota of processor time that only several processes exhaust.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# Seconds of `_work` on one quiet core of the machine for which the tests state their timeouts (2.6 GHz, Python 3.11).
REFERENCE = 0.03
# By how much a timeout exceeds what the measurements ask for.
MARGIN = 3.0
# What hangs and spins makes the machine busy: without a limit it would lengthen the wait for itself.
MOST = 6.0
# Time between two looks of `until`, in seconds.
INTERVAL = 0.02


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as the session found it.

    Attributes:
        slowness: Wall time of the fixed computation over its reference; a core shared by two programs doubles it.
        load: Processes that wanted to run, per core, when it was measured.
    """

    slowness: float
    load: float


def patience(seconds: float) -> float:
    """The timeout in seconds for what takes at most `seconds` on a quiet machine of the reference speed."""
    return MARGIN * scaled(seconds)


def scaled(seconds: float) -> float:
    """A duration of `seconds` on a quiet machine of the reference speed, which a test lets pass."""
    return seconds * factor()


def scaled_minutes(minutes: float) -> float:
    """The same of a flag in minutes, such as --hang-timeout-minutes."""
    return round(scaled(minutes), 6)


def factor() -> float:
    """By how much everything takes longer now than stated: at least 1, and at most what a hang may cost."""
    machine = measured()
    # The slowness holds the load of the start; the load of now counts where it is higher.
    return min(MOST, max(1.0, machine.slowness) * max(1.0, _load() / max(1.0, machine.load)))


def until(condition: Callable[[], object], seconds: float, failure: str | Callable[[], str]) -> None:
    """Wait for a condition, and fail with a message (or what a function says) when the patience is at its end.

    The machine may become busy meanwhile: the timeout is that of the end, not of the start.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > patience(seconds):
            raise AssertionError(failure if isinstance(failure, str) else failure())
        time.sleep(INTERVAL)


@functools.cache
def measured() -> Machine:
    """Measure the machine, once per process."""
    _work()  # the first run pays for what is lazily loaded
    start = time.perf_counter()
    _work()
    return Machine(slowness=(time.perf_counter() - start) / REFERENCE, load=_load())


def _load() -> float:
    """Processes that want to run, per core: the mean of the last minute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return os.getloadavg()[0] / cores


def _work() -> int:
    """A fixed computation in Python, which is what tests and the starts of programs consist of."""
    total, seen = 0, {}
    for k in range(300_000):
        total = (total * 31 + k) & 0xFFFFFF
        seen[total & 1023] = k
    return total + len(seen)
