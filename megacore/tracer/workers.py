"""Processes in which ranks take their steps on fake tensors, one rank after the other each."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any, Literal, TypeVar

from megacore.errors import UserError
from megacore.parallel.processors import end_with_parent
from megacore.tracer.fake_job import absent_accelerator

T = TypeVar("T")


def in_processes(
    step: Callable[[int], T], ranks: Sequence[int], count: int, *, method: Literal["fork", "spawn"] = "fork"
) -> Iterator[T]:
    """What `step` finds of each rank, in their order; however this process ends, or what it waits for, the others end
    at once. `step`: of a rank with this number. Processes that are forked inherit it, so that nothing of it is pickled:
    what a program has registered cannot be. Raises UserError where one of them was killed."""
    others, context = multiprocessing.active_children(), multiprocessing.get_context(method)
    with ProcessPoolExecutor(count, context, initializer=_begin, initargs=(step,)) as pool:
        try:
            yield from pool.map(_step_of, ranks)
        except BrokenExecutor:
            raise UserError(
                "a process that takes a step on fake tensors was killed, perhaps for lack of memory: use --estimate, "
                "or --dry-run without full"
            ) from None
        except BaseException:  # Ctrl-C: leaving the block would wait for the steps that they take
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise


_step: Callable[[int], Any] | None = None  # in a process of these


def _begin(step: Callable[[int], Any]) -> None:
    global _step
    _step = step
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C for all
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    # The device must be known before a process computes gradients, on whatever device.
    absent_accelerator()


def _step_of(rank: int) -> Any:
    assert _step is not None
    return _step(rank)
