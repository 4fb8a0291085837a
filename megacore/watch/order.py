"""The order in which a rank communicates in a step: programs repeat it, and a rank that leaves it is a suspect."""

from __future__ import annotations

from collections.abc import Iterator


class UsualOrder:
    """Compares each step's operations with those of the step before, from the second equal step on. An operation is a
    number that stands for its kind, group and size."""

    def __init__(self) -> None:
        # Number of the step in which the rank left its order; 0: it has not, or a whole step was usual since.
        self.left_in = 0
        # The operations that the step has not come to yet; None: any may follow.
        self.expected: Iterator[int] | None = None
        self._step = 0
        self._usual: list[int] = []
        self._is_settled = False

    def begin(self, step: int) -> None:
        """A step begins, numbered from 1."""
        self._step = step
        self.expected = iter(self._usual) if self._is_settled and not self.left_in else None

    def leave(self) -> None:
        """The rank has begun another operation than was expected."""
        self.left_in, self.expected = self._step, None

    def end(self, done: list[int]) -> None:
        self.expected = None
        if done == self._usual:
            self._is_settled, self.left_in = True, 0
            return
        if self._is_settled:
            self.left_in = self._step
        self._is_settled, self._usual = False, done
