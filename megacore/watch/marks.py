"""The seam between training and its watchdog: functions that say what this process does now.

    with phase(Phase.FORWARD, stage=1, microbatch=3):      # computes
        ...
    with post(Phase.ALL_REDUCE, group.ranks, x.nbytes):    # communicates, and waits for it
        ...
    operation = post(Phase.ALL_GATHER, group.ranks, 4096)  # begins to communicate
    with operation:                                        # waits for it
        ...

A process has one ledger, as it has one standard error: it is not passed around. Without one (`--hang-timeout-minutes
0`, or the library used by itself) nothing is written. Only one thread at a time may mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from megacore.watch.ledger import AGREED, SECTIONS, Ledger, Phase, code_of


class _Unmarked(AbstractContextManager["_Unmarked"]):
    """A context that does nothing."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        pass


UNMARKED = _Unmarked()
"""Marks nothing."""


class Listener(Protocol):
    """Hears of operations, and of copies from and to host memory, while a step is traced."""

    def around(
        self, kind: Phase, ranks: tuple[int, ...], nbytes: int, wait: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """The context to use in place of `wait`, which it enters and leaves."""

    def copying(self, name: str, nbytes: int) -> AbstractContextManager[Any]:
        """The context in which a copy is queued in the current stream."""


class Current:
    """The ledger of this process.

    Attributes:
        ledger: None if there is none.
        listener: hears of every operation too; None: nobody does.
    """

    ledger: ClassVar[Ledger | None] = None
    listener: ClassVar[Listener | None] = None


def phase(kind: Phase, *, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[Any]:
    """The context of a phase.

    Args:
        kind: not communication, and not a section.
        stage: pipeline stage that is computed.
        microbatch: of the step.
    """
    if Current.ledger is None:
        return UNMARKED
    return _mark(kind, stage, microbatch)


def post(kind: Phase, ranks: tuple[int, ...], nbytes: int) -> AbstractContextManager[Any]:
    """Count an operation of this rank; the result is the context of the wait for it, which may be entered again.

    Args:
        kind: SEND, RECEIVE or a collective.
        ranks: global ranks of the group in its order; for a message its sender and its receiver.
        nbytes: size on this rank.
    """
    wait = UNMARKED if Current.ledger is None else Current.ledger.post(kind, ranks, nbytes)
    return wait if Current.listener is None else Current.listener.around(kind, ranks, nbytes, wait)


def votes_on_operations() -> tuple[int, int]:
    """This rank's terms of two sums, as `Ledger.votes_on_operations`; zeros without a ledger."""
    return (0, 0) if Current.ledger is None else Current.ledger.votes_on_operations()


def operations_differ(votes: Sequence[int], world_size: int) -> bool:
    """Whether the ranks have posted different operations.

    Args:
        votes: `votes_on_operations` summed over all ranks; empty for one process.
        world_size: number of ranks.
    """
    return bool(votes) and votes[0] == world_size and votes[1] % AGREED != 0


class section(ContextDecorator):  # noqa: N801
    """The context, or the decorator, of a phase that contains others.

    Args:
        kind: one of SECTIONS, except a step.
    """

    def __init__(self, kind: Phase) -> None:
        assert kind in SECTIONS
        self._kind = kind
        self._before: list[int] = []

    def __enter__(self) -> None:
        if Current.ledger is not None:
            self._before.append(Current.ledger.enter_section(self._kind))

    def __exit__(self, *_: object) -> None:
        if Current.ledger is not None and self._before:
            Current.ledger.leave_section(self._before.pop())


def on_ledger(act: Callable[[Ledger], object]) -> None:
    """Do something with this process's ledger if it has one."""
    if Current.ledger is not None:
        act(Current.ledger)


class _Mark:
    """Enters and leaves a phase."""

    __slots__ = ("_code",)

    def __init__(self, code: int) -> None:
        self._code = code

    def __enter__(self) -> None:
        if Current.ledger is not None:
            Current.ledger.enter(self._code)

    def __exit__(self, *_: object) -> None:
        if Current.ledger is not None:
            Current.ledger.leave()


@lru_cache(maxsize=4096)
def _mark(kind: Phase, stage: int | None, microbatch: int | None) -> _Mark:
    return _Mark(code_of(kind, stage=stage, microbatch=microbatch))
