"""What this process does now, said where it happens, for whoever watches the run.

    with phase(Phase.FORWARD, stage=1, microbatch=3):      # computes
        ...
    with post(Phase.ALL_REDUCE, group.ranks, x.nbytes):    # communicates, and waits for it
        ...
    operation = post(Phase.ALL_GATHER, group.ranks, 4096)  # begins to communicate
    with operation:                                        # waits for it
        ...

A process has one heartbeat, as it has one standard error: it is not passed around. Without one (`--hang-timeout-minutes
0`, a tree without `megacore.watch`, or the library used by itself) nothing is written. Only one thread at a time may
write.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar, Protocol

AGREED = 1 << 32
"""The sum of the ranks' second votes on operations is a multiple of it, unless they differ."""


class Phase(IntEnum):
    """What a rank may be doing. Those from ALL_REDUCE on are communication."""

    START = 0
    IMPORT = 1
    CONNECT = 2
    BUILD = 3
    INDEX = 4
    LOAD = 5
    FIRST_STEP = 6
    STEP = 7
    DATA = 8
    FORWARD = 9
    BACKWARD = 10
    OPTIMIZER = 11
    EVALUATE = 12
    SAVE = 13
    SINK = 14
    EXIT = 15
    DONE = 16
    CHECK = 17
    OUTSIDE = 18
    BETWEEN_STEPS = 19
    ALL_REDUCE = 32
    ALL_GATHER = 33
    REDUCE_SCATTER = 34
    GATHER_OBJECTS = 35
    BARRIER = 36
    TIED_SUM = 37
    SEND = 38
    RECEIVE = 39
    MEET = 40
    SHIFT = 41
    ALL_TO_ALL = 42

    @property
    def communicates(self) -> bool:
        return self >= Phase.ALL_REDUCE

    @property
    def is_message(self) -> bool:
        return self in MESSAGES

    @property
    def in_words(self) -> str:
        return self.name.lower().replace("_", "-")


MESSAGES = frozenset({Phase.SEND, Phase.RECEIVE})
SECTIONS = frozenset(
    {
        *(Phase.START, Phase.INDEX, Phase.LOAD, Phase.FIRST_STEP, Phase.STEP),
        *(Phase.EVALUATE, Phase.CHECK, Phase.SAVE, Phase.SINK, Phase.EXIT, Phase.DONE),
    }
)
"""Phases that contain others, and decide how long one of these may take."""


@dataclass(frozen=True)
class Channel:
    """Ranks that communicate in one order: a group, or the sender and the receiver of messages."""

    ranks: tuple[int, ...]
    is_message: bool = False


def code_of(phase: Phase, *, channel: int = 0, stage: int | None = None, microbatch: int | None = None) -> int:
    """A phase with its particulars in 64 bits. `channel`: number of the channel, from 1; 0: none."""
    s, m = (0 if number is None else number + 1 for number in (stage, microbatch))
    return phase | channel << 8 | (s & 0xFFFF) << 16 | (m & 0x7FFFFFFF) << 32


class Heartbeat(Protocol):
    """Writes down what this process does; `megacore.watch.ledger.Ledger` does so where other processes can read it."""

    def enter(self, code: int) -> None:
        """A phase begins, by its code."""

    def leave(self) -> None:
        """The phase ends, and the one around it continues."""

    def phases(self) -> Sequence[int]:
        """The codes of the phases that have begun and not ended, the inmost last."""

    def resume(self, phases: Sequence[int]) -> None:
        """Another computation of this process continues, which was in these phases."""

    def enter_section(self, phase: Phase) -> int:
        """A phase that contains others begins; returns what `leave_section` is to be given."""

    def leave_section(self, before: int) -> None:
        """The section ends."""

    def begin_step(self, step: int) -> None:
        """Step number `step`, from 1, begins."""

    def end_step(self) -> None:
        """The step is done."""

    def leave_step(self) -> None:
        """The step ends by an error: it is not compared with others."""

    def post(self, phase: Phase, ranks: tuple[int, ...], nbytes: int) -> AbstractContextManager[Any]:
        """An operation over `ranks` begins; the result is the context in which to wait for it."""

    def votes_on_operations(self) -> tuple[int, int]:
        """This rank's terms of two sums over all ranks, see `operations_differ`."""


class _Unmarked(AbstractContextManager["_Unmarked"]):
    """A context that does nothing."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        pass


UNMARKED = _Unmarked()
"""Writes nothing."""


class Listener(Protocol):
    """Hears of operations, and of copies from and to host memory, while a step is traced."""

    def around(
        self, kind: Phase, ranks: tuple[int, ...], nbytes: int, wait: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """The context to use in place of `wait`, which it enters and leaves."""

    def copying(self, name: str, nbytes: int) -> AbstractContextManager[Any]:
        """The context in which a copy is queued in the current stream."""


class Current:
    """What there is in this process."""

    heartbeat: ClassVar[Heartbeat | None] = None  # None: nobody watches
    listener: ClassVar[Listener | None] = None  # hears of every operation too; None: nobody does


def phase(kind: Phase, *, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[Any]:
    """The context of a phase, which is neither communication nor a section."""
    if Current.heartbeat is None:
        return UNMARKED
    return _of_phase(kind, stage, microbatch)


def post(kind: Phase, ranks: tuple[int, ...], nbytes: int) -> AbstractContextManager[Any]:
    """Count an operation of this rank; the result is the context of the wait for it, which may be entered again.
    `kind`: SEND, RECEIVE or a collective. `ranks`: global ranks of the group in its order; for a message its sender and
    its receiver."""
    wait = UNMARKED if Current.heartbeat is None else Current.heartbeat.post(kind, ranks, nbytes)
    return wait if Current.listener is None else Current.listener.around(kind, ranks, nbytes, wait)


def votes_on_operations() -> tuple[int, int]:
    """This rank's terms of the two sums that `operations_differ` reads; zeros without a heartbeat."""
    return (0, 0) if Current.heartbeat is None else Current.heartbeat.votes_on_operations()


def operations_differ(votes: Sequence[int], world_size: int) -> bool:
    """Whether the ranks posted different operations. `votes`: `votes_on_operations` of all, summed; empty on one
    process."""
    return bool(votes) and votes[0] == world_size and votes[1] % AGREED != 0


class section(ContextDecorator):  # noqa: N801
    """The context, or the decorator, of a phase that contains others. `kind`: one of SECTIONS, except a step."""

    def __init__(self, kind: Phase) -> None:
        assert kind in SECTIONS
        self._kind = kind
        self._before: list[int] = []

    def __enter__(self) -> None:
        if Current.heartbeat is not None:
            self._before.append(Current.heartbeat.enter_section(self._kind))

    def __exit__(self, *_: object) -> None:
        if Current.heartbeat is not None and self._before:
            Current.heartbeat.leave_section(self._before.pop())


class _InPhase:
    """Enters and leaves a phase."""

    __slots__ = ("_code",)

    def __init__(self, code: int) -> None:
        self._code = code

    def __enter__(self) -> None:
        if Current.heartbeat is not None:
            Current.heartbeat.enter(self._code)

    def __exit__(self, *_: object) -> None:
        if Current.heartbeat is not None:
            Current.heartbeat.leave()


@lru_cache(maxsize=4096)
def _of_phase(kind: Phase, stage: int | None, microbatch: int | None) -> _InPhase:
    return _InPhase(code_of(kind, stage=stage, microbatch=microbatch))
