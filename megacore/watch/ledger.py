"""A rank's ledger: one memory-mapped file with what the rank does at this moment, which other processes of the node
read without the rank's help: also when it is stopped, killed or blocked in C. Entering or leaving a phase is two
stores, of the phase as one 64-bit code and of the time, CLOCK_MONOTONIC, which all processes of a node share.

Layout, in words of 8 bytes: the fields of `Word`, then for each channel (a group that communicates, or a sender and
receiver) how many operations the rank has posted, then a JSON text with what never or rarely changes.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from megacore.parallel.heartbeat import AGREED, MESSAGES, Channel, Current, Phase, code_of
from megacore.watch.operation_log import OperationLog
from megacore.watch.order import UsualOrder

MAGIC = 0x6D656761_00000002  # the last half is the version of this layout
SUFFIX = ".ledger"
_CHANNELS = 250
TEXT = 8192
"""Offset of the text, in bytes."""
SIZE = 1 << 18
"""Of the file, in bytes."""
_RECENT_STEPS = 31


class Word(IntEnum):
    """The fields of a ledger, by their number."""

    MAGIC = 0
    PHASE = 1
    SINCE = 2
    SECTION = 3
    STEP = 4
    AWAITED = 5
    BYTES = 6
    DEVIATION = 7
    MEDIAN_STEP = 8
    FLAGS = 9
    TERMINATING = 10
    VERDICT = 11
    TEXT_BYTES = 12
    POSTED = 16  # and what follows


class Flag(IntEnum):
    """Bits of Word.FLAGS."""

    GUARDED = 1  # the ranks of the node notice each other's death by themselves
    SPOKE = 2  # the rank has said itself why it ends
    ASYNCHRONOUS = 4  # an accelerator computes: the program may be ahead of it
    HIDDEN = 8  # compiled code communicates without a mark


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a rank says about itself once."""

    rank: int
    world_size: int
    local_world_size: int  # number of ranks on this node
    host: str
    pid: int
    born: int  # when the process started, in clock ticks since boot, which tells it from a later one of the same number
    degrees: Mapping[str, int]  # ranks along each dimension, outermost first
    output_dir: str
    hang_timeout: float  # seconds
    collective_timeout: float  # seconds after which the backend itself fails
    node: int = 0


class _Kind(NamedTuple):
    """What operations of a phase over the same ranks share."""

    word: int  # counts them and the other operations of their channel
    tag: int  # phase and channel, to which the size is added
    code: int  # of the phase in which to wait for one
    ranks: tuple[int, ...]  # kept, because their identity must not be used again


class Ledger:
    """Writes this process's ledger."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.identity, self.directory = identity, directory
        self.path = directory / f"rank-{identity.rank}{SUFFIX}"  # of this one
        new = self.path.with_suffix(f".{identity.pid}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _reserve(descriptor)
            self._map = mmap.mmap(descriptor, SIZE)
        except OSError:
            new.unlink()
            raise
        finally:
            os.close(descriptor)
        view = memoryview(self._map)
        self._words, self._reals = view.cast("Q"), view.cast("d")
        self._kinds: dict[tuple[int, Phase], _Kind] = {}  # by the identity of the ranks
        self._numbers: dict[Channel, int] = {}
        self._log = OperationLog(_CHANNELS, MESSAGES)
        self._stack: list[int] = []
        self._code, self._since = code_of(Phase.IMPORT), monotonic()
        # Time that this process has spent in each phase itself, without the phases inside it; by its number.
        self.seconds = [0.0] * 64
        self.first_step = True  # whether no step has been done
        self._order = UsualOrder()
        # `had_deviated`: whether this rank had left its usual order of operations at its last vote. Later the ranks may
        # leave it together, to find out why a loss is not finite.
        self.in_step = self.had_deviated = False  # whether a step is under way
        self._begun = 0.0
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._words[Word.PHASE], self._reals[Word.SINCE] = self._code, self._since
        self._describe()
        self._words[Word.MAGIC] = MAGIC
        # Complete before it has the name that the watcher looks for.
        os.replace(new, self.path)

    # ---- phases

    def rest_in(self, phase: Phase) -> None:
        """Set the phase that the rank is in outside of every other phase. Only to be called outside of all phases."""
        assert not self._stack
        self._code, self._since = code_of(phase), monotonic()
        self._words[Word.PHASE], self._reals[Word.SINCE] = self._code, self._since

    def enter(self, code: int) -> None:
        now = monotonic()
        self.seconds[self._code & 63] += now - self._since
        self._stack.append(self._code)
        self._code, self._since = code, now
        self._words[1] = code  # Word.PHASE and Word.SINCE: members of an enumeration would double the cost
        self._reals[2] = now

    def enter_wait(self, code: int, count: int, nbytes: int) -> None:
        """The wait for operation number `count` of the phase's channel begins; `nbytes` on this rank."""
        words = self._words
        words[5] = count  # Word.AWAITED
        words[6] = nbytes  # Word.BYTES
        self.enter(code)

    def leave(self) -> None:
        now = monotonic()
        self.seconds[self._code & 63] += now - self._since
        self._code, self._since = self._stack.pop(), now
        self._words[1] = self._code
        self._reals[2] = now

    def phases(self) -> Sequence[int]:
        return [*self._stack, self._code]

    def resume(self, phases: Sequence[int]) -> None:
        self.enter(phases[-1])  # which counts the time of the other one
        self._stack = [*phases[:-1]]

    def enter_section(self, phase: Phase) -> int:
        """A phase that contains others begins; returns the one before, for `leave_section`."""
        before = self._words[Word.SECTION]
        self._words[Word.SECTION] = phase
        self.enter(phase)
        return before

    def leave_section(self, before: int) -> None:
        self.leave()
        self._words[Word.SECTION] = before
        if not self.in_step:
            self._log.begin()

    def begin_step(self, step: int) -> None:
        self._words[Word.STEP] = step
        if self.first_step and not self._stack and self._code != Phase.OUTSIDE:
            self.rest_in(Phase.BETWEEN_STEPS)
        self.enter_section(Phase.FIRST_STEP if self.first_step else Phase.STEP)
        if self._numbers:
            self._log.begin()
            self._order.begin(step)
        self.in_step, self._begun = True, self._since

    def leave_step(self) -> None:
        """The step ends, perhaps by an error: it is not compared with others."""
        self.leave_section(Phase.STEP)
        self.in_step, self._order.expected = False, None

    def end_step(self) -> None:
        self.leave_step()
        seconds = self._since - self._begun
        if not self.first_step:
            self._steps.append(seconds)
        # The first step takes longer than the others; it counts as long as there is no other.
        self._reals[Word.MEDIAN_STEP] = statistics.median(self._steps or [seconds])
        self.first_step = False
        if self._numbers:  # one process communicates with nobody
            self._order.end(self._log.posted)
            self._words[Word.DEVIATION] = self._order.left_in
            self._log.begin()

    # ---- communication

    def post(self, phase: Phase, ranks: tuple[int, ...], nbytes: int) -> Operation:
        """An operation over `ranks` begins; the result is the context in which to wait for it."""
        kind = self._kinds.get((id(ranks), phase)) or self._kind(phase, ranks)
        count = self._words[kind.word] + 1
        self._words[kind.word] = count
        operation = nbytes << 16 | kind.tag
        self._log.posted.append(operation)
        order = self._order
        if order.expected is not None and next(order.expected, None) != operation:
            order.leave()
            self._words[Word.DEVIATION] = order.left_in
        return Operation(self, kind.code, count, nbytes)

    def _kind(self, phase: Phase, ranks: tuple[int, ...]) -> _Kind:
        channel = Channel(ranks, phase.is_message)
        if channel not in self._numbers and len(self._numbers) < _CHANNELS:
            self._numbers[channel] = len(self._numbers) + 1
            self._describe()
        number = self._numbers.get(channel, 0)
        kind = _Kind(Word.POSTED + number, phase | number << 8, code_of(phase, channel=number), ranks)
        self._kinds[id(ranks), phase] = kind
        return kind

    # ---- agreement

    def votes_on_operations(self) -> tuple[int, int]:
        """This rank's terms of two sums over all ranks, where all are at the same point of a step: the number of ranks
        that know all their operations; and, if that is every rank, a multiple of AGREED where the members of every
        channel have posted the same operations of the same sizes, and otherwise none, except with probability 1 /
        AGREED."""
        self.had_deviated = self._words[Word.DEVIATION] != 0
        self._log.begin_vote()
        if self._words[Word.FLAGS] & Flag.HIDDEN or len(self._numbers) == _CHANNELS:
            return 0, 0
        total = 0
        for channel, number in self._numbers.items():
            digest = self._log.digests[number]
            is_first = channel.ranks[0] == self.identity.rank
            # The first member adds what the others subtract: equal digests add up to 0, without a message of their own.
            total += digest * (len(channel.ranks) - 1) if is_first else -digest
        return 1, total % AGREED

    def recent_operations(self) -> dict[Channel, list[tuple[int, str, int]]] | None:
        """The operations on each channel since the last vote but one: number, kind and bytes. Those before are agreed
        on, or the run would have ended. None if there were more than are remembered."""
        recent = self._log.since_last_vote_but_one()
        if recent is None:
            return None
        channels = {number: channel for channel, number in self._numbers.items()}
        left = [self._words[Word.POSTED + number] for number in range(_CHANNELS + 1)]
        operations: dict[Channel, list[tuple[int, str, int]]] = {}
        for operation in recent:
            number, kind = operation >> 8 & 0xFF, Phase(operation & 0xFF)
            if number in channels:
                name = "message" if kind.is_message else kind.in_words
                operations.setdefault(channels[number], []).append((left[number], name, operation >> 16))
                left[number] -= 1
        return {channel: posted[::-1] for channel, posted in operations.items()}

    # ---- the rest

    def set_flag(self, flag: Flag) -> None:
        """Say something about this rank that remains true."""
        self._words[Word.FLAGS] |= flag

    def note_termination(self) -> None:
        """A signal asks this rank to end."""
        if not self._reals[Word.TERMINATING]:
            self._reals[Word.TERMINATING] = monotonic()

    @property
    def verdict(self) -> bool:
        """Whether the watcher has reported why the run ends: this rank is to end, without a word."""
        return self._words[Word.VERDICT] != 0

    @property
    def leaves_as_hung(self) -> bool | None:
        """Whether this rank is to end by itself as hung; None: it does not look any more, as others wait for that."""
        if self._words[Word.FLAGS] & Flag.GUARDED:
            return None
        return self._words[Word.VERDICT] == 2

    def finish(self) -> None:
        """The run is over on this rank, which nobody has to watch any more."""
        self._words[Word.SECTION] = self._words[Word.PHASE] = Phase.DONE

    def _describe(self) -> None:
        channels = [[_progressions(channel.ranks), channel.is_message] for channel in self._numbers]
        about = asdict(self.identity)
        while len(text := json.dumps({"identity": about, "channels": channels}).encode()) > SIZE - TEXT and channels:
            channels.pop()  # the reader knows channels by their number: the last ones are without ranks
        # A reader takes the text only with a length: not while it is half written.
        self._words[Word.TEXT_BYTES] = 0
        self._map[TEXT : TEXT + len(text)] = text
        self._words[Word.TEXT_BYTES] = len(text)


def _progressions(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranks, in their order, as few progressions of first rank, difference and number; a group of a mesh is one."""
    result: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, difference, count = result[-1] if result else (rank, 1, 0)
        if count == 1:
            result[-1] = (first, rank - first, 2)
        elif count and rank == first + count * difference:
            result[-1] = (first, difference, count + 1)
        else:
            result.append((rank, 1, 1))
    return result


def _reserve(descriptor: int) -> None:
    """Give a new file its size, and memory for all of it: writing to a mapped page that has none kills the process.
    Raises OSError where there is no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, SIZE)
    else:
        os.ftruncate(descriptor, SIZE)


class Operation:
    """A posted operation; as a context, the wait for it. May be entered again."""

    __slots__ = ("_code", "_count", "_ledger", "_nbytes")

    def __init__(self, ledger: Ledger, code: int, count: int, nbytes: int) -> None:
        self._ledger, self._code, self._count, self._nbytes = ledger, code, count, nbytes

    def __enter__(self) -> Operation:
        self._ledger.enter_wait(self._code, self._count, self._nbytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.leave()


def this_ledger() -> Ledger | None:
    """That of this process, if it is watched."""
    return Current.heartbeat if isinstance(Current.heartbeat, Ledger) else None
