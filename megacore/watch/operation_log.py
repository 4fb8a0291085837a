"""The operations that a rank has posted, and a digest of those on each channel, which ranks can compare. An operation
is a number: its size in bytes << 16 | its channel << 8 | its phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

RECENT_OPERATIONS = 1 << 17
"""How many operations are remembered between two votes."""
_RUNS = 8  # that are kept: a step is digested in two or three
_PRIME, _BASE = 2**61 - 1, 0x1A2F_9D3B_75C4_E68D  # of the digests: a Mersenne prime, and any number below it


class _Run:
    """A series of operations, and what it adds to the digests of its channels. The digest of a channel is a polynomial
    whose coefficients are its operations: it is the same however they are cut into series. Sending and receiving a
    message count as the same operation."""

    def __init__(self, operations: list[int], messages: Collection[int]) -> None:
        self.operations = operations
        # By the number of a channel: the factor for the digest so far, and the term that is added to it.
        self.digests: dict[int, tuple[int, int]] = {}
        for operation in operations:
            number, phase, nbytes = operation >> 8 & 0xFF, operation & 0xFF, operation >> 16
            kind = 0 if phase in messages else phase
            factor, term = self.digests.get(number, (1, 0))
            mixed = hash((nbytes, kind))  # of integers: no process salts it
            self.digests[number] = factor * _BASE % _PRIME, (term * _BASE + mixed) % _PRIME


class OperationLog:
    """Remembers operations in order, on channels up to a number; phases of `messages` count as one."""

    def __init__(self, channels: int, messages: Collection[int]) -> None:
        self.posted: list[int] = []  # operations since a step last began or ended; whoever posts one appends it
        self.digests = [0] * (channels + 1)  # of each channel, by its number, of the operations that `digest` has noted
        self._messages = messages
        self._digested = 0  # how many of `posted`
        self._runs: dict[int, _Run] = {}  # by where they begin in `posted`
        self._recent, self._voted = _operations(), _operations()  # since the last vote, and those that it was about

    def begin(self) -> None:
        self.digest()
        self.posted, self._digested = [], 0

    def digest(self) -> None:
        """Note what was posted since the last time."""
        start, operations = self._digested, self.posted[self._digested :]
        run = self._runs.get(start)
        if run is None or run.operations != operations:
            run = self._runs[start] = _Run(operations, self._messages)
            while len(self._runs) > _RUNS:
                del self._runs[next(iter(self._runs))]
        for number, (factor, term) in run.digests.items():
            self.digests[number] = (self.digests[number] * factor + term) % _PRIME
        self._recent.extend(operations)
        self._digested = len(self.posted)

    def begin_vote(self) -> None:
        """A vote is about the operations up to now."""
        self.digest()
        self._voted, self._recent = self._recent, _operations()

    def since_last_vote_but_one(self) -> Iterator[int] | None:
        """Operations, the latest first; None if there were more than are remembered."""
        self.digest()
        if RECENT_OPERATIONS in (len(self._recent), len(self._voted)):
            return None
        return (operation for part in (self._recent, self._voted) for operation in reversed(part))


def _operations() -> deque[int]:
    return deque(maxlen=RECENT_OPERATIONS)
