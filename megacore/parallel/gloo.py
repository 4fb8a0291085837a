"""gloo as megacore sets it: connections on demand, no record of operations, few threads on a crowded machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from megacore.config.nodes import launcher_number
from megacore.parallel.processors import available_cores

# By which the size of torch's record of operations is set: its name, and the one of older releases.
_RECORD_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_CROWD = 64  # ranks per core from which the threads of gloo take more time than a shared one costs
_MOST_CONNECTED = 16  # ranks of a group of which each connects with every other one when the group is made


def prepare() -> None:
    """Set what gloo reads from the environment, unless the user has; to be called before the job is joined.

    Two ranks connect when they first communicate, not every rank with every other one. torch keeps no record of the
    last 2,000 operations: each entry holds the call stack, many small blocks that outlive a step, in holes of the heap
    that the next tensor of the same size then does not fit. The heap of a rank grows for as long as the record does.
    megacore's watchdog has a record too.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if not any(name in os.environ for name in _RECORD_SIZES):
        os.environ[_RECORD_SIZES[0]] = "0"


@contextlib.contextmanager
def few_threads(size: int) -> Iterator[None]:
    """Let a group of this many ranks that is made in the body share a thread with others, where that is faster. gloo
    makes a thread for every group, which wakes up a hundred times a second whether or not anything arrives. Where
    hundreds of ranks share a core, that takes most of its time. A shared thread moves the bytes of its groups one after
    the other, so that ranks with cores of their own keep one for each."""
    crowd = launcher_number("LOCAL_WORLD_SIZE", 1, low=1)
    if crowd < _CROWD * available_cores() or size > _MOST_CONNECTED:
        yield
        return
    module: Any = dist.distributed_c10d
    original, module.ProcessGroupGloo = module.ProcessGroupGloo, _OnSharedDevice  # torch has no argument for it
    try:
        yield
    finally:
        module.ProcessGroupGloo = original


class _OnSharedDevice(dist.ProcessGroupGloo):
    """A group of the process's shared device, which has one thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = self._Options()  # type: ignore[attr-defined]
        options._timeout, options._devices, options._threads = timeout, [_shared_device()], 2
        super().__init__(store, rank, size, options)


@cache
def _shared_device() -> Any:
    """Its groups connect at once: a connection on demand has the number of a rank within its group, which a device
    cannot tell from the same rank of another group."""
    return dist.ProcessGroupGloo.create_default_device(lazy_init=False)
