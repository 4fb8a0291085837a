"""The processors of the host: whether ranks compute on them, how many cores a process, or a rank, may use, when a rank
gives its core to another, and when a process ends with the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from fractions import Fraction

# What the drivers of NVIDIA, AMD and WSL put there where there is an accelerator.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def cores_of_process() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def available_cores() -> int:
    """How many cores this process may use."""
    return len(cores_of_process())


def computes_on_cpu(device: str) -> bool:
    """Whether ranks compute on this machine's CPU, by --device; False where there may be an accelerator. Needs no
    torch."""
    return device == "cpu" or not any(map(os.path.exists, _DEVICE_FILES))


def share_of_cores(cores: frozenset[int], node: Sequence[frozenset[int]]) -> int:
    """A rank's share of its node's cores, at least 1: a core that n ranks may use counts 1/n for each of them. So a
    rank has all cores that only it may use, and ranks that may use the same cores divide them. `cores`: that the rank
    may use. `node`: the same for every rank of its node, this one among them."""
    return max(1, int(sum(Fraction(1, sum(core in others for others in node)) for core in cores)))


def take_long_turns() -> None:
    """Choose Linux's scheduling policy SCHED_BATCH for this thread and those that it starts: none of them interrupts
    another one when it wakes up.

    The threads of gloo wake up for every piece of a message. Under the default policy each then interrupts the thread
    that computes on its core, whose part of a matrix product leaves the cache. Under SCHED_BATCH it waits until that
    thread has had its turn, a few milliseconds. Nothing changes on other systems, where the system forbids it, or where
    the user chose a policy (chrt).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def end_with_parent() -> None:
    """Let this process of `multiprocessing` end with the thread that started it, however that ends. Only Linux can."""
    parent = multiprocessing.parent_process()
    of_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"  # which ends with it
    if sys.platform == "linux" and parent is not None and not of_server:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it has ended before
            os.kill(os.getpid(), signal.SIGKILL)
