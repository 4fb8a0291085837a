"""The order in which a rank communicates in a step: programs repeat it, and a rank that leaves it is a suspect."""

from __future__ import annotations


class UsualOrder:
    """Compares each step's operations with those of the step before, from the second equal step on.

    Attributes:
        left_in: number of the step in which the rank left its order; 0: it has not, or a whole step was usual since.
    """

    def __init__(self) -> None:
        self.left_in = 0
        self._step = 0
        self._usual: list[int] = []
        self._done: list[int] = []
        self._is_settled = False

    def begin(self, step: int) -> None:
        """A step begins, numbered from 1."""
        self._step, self._done = step, []

    def note(self, operation: int) -> None:
        """The rank begins an operation: a number that stands for its kind, group and size."""
        done = self._done
        if self._is_settled and not self.left_in:
            at = len(done)
            if at >= len(self._usual) or self._usual[at] != operation:
                self.left_in = self._step
        done.append(operation)

    def end(self) -> None:
        """The step is done."""
        if self._done == self._usual:
            self._is_settled, self.left_in = True, 0
            return
        if self._is_settled:
            self.left_in = self._step
        self._is_settled, self._usual = False, self._done
