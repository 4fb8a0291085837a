"""Processes of this machine, from /proc: whether they run, and since when. Elsewhere they count as running."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from megacore.watch.blame import State

_QUIET_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def born(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where that is unknown."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def started(since: int) -> float:
    """The time of `time.monotonic` at which a process started, from `born`."""
    asleep = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) - time.monotonic()
    return since / os.sysconf("SC_CLK_TCK") - asleep


def state_of(pid: int, since: int) -> State:
    """The state of the process that had this number and start."""
    fields = _fields(pid)
    if fields is None:
        if Path("/proc/self/stat").exists():
            return "gone"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return "running"
        return "gone"
    if (since and int(fields[19]) != since) or fields[0] in "ZXx":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def is_busy(pid: int) -> bool:
    """Whether the main thread of a process is on a processor, or waits for one."""
    fields = _fields(pid)
    return fields is not None and fields[0] == "R"


def was_asked_to_end(pid: int) -> bool | None:
    """Whether a process that its parent has not collected yet was ended by a signal of a user or a launcher; None: it
    is collected, or that is unknown."""
    fields = _fields(pid)
    if fields is None or fields[0] != "Z" or len(fields) < 50:
        return None
    return int(fields[49]) & 0x7F in _QUIET_ENDS


def end(pids: Iterable[int], patience: float) -> list[int]:
    """Ask processes to end, and kill those that have not within `patience` seconds; returns the killed ones."""
    starts = {pid: born(pid) for pid in pids}
    for pid in starts:
        is_stopped = state_of(pid, starts[pid]) == "stopped"  # it could not answer
        send(pid, signal.SIGKILL if is_stopped else signal.SIGTERM)
    deadline = time.monotonic() + patience
    left = list(starts)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if state_of(pid, starts[pid]) != "gone"]
    for pid in left:
        send(pid, signal.SIGKILL)
    return left


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
