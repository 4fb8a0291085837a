"""A table of embeddings whose rows appear when an id is first seen, and disappear when it is seen no more.

What a row starts with depends on its id only, so it does not matter which rank holds it, or when it appeared. The
update is row-wise Adagrad (as in DLRM, Naumov et al. 2019, arXiv 1906.00091): one number of state per row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from clicks import mixed, uniform

_OWNER_SEED, _VALUE_SEED = 3, 4
_EPSILON = 1e-8


def owners(ids: Tensor, ranks: int) -> Tensor:
    """Which rank holds each id: its hash modulo the ranks."""
    return torch.from_numpy((mixed(ids.numpy(), _OWNER_SEED) % np.uint64(ranks)).astype(np.int64))


def first_values(ids: Tensor, columns: int) -> Tensor:
    """[n, columns]: what the rows of these ids start with."""
    numbers = ids.numpy()[:, None] * columns + np.arange(columns)
    return torch.from_numpy(uniform(numbers, _VALUE_SEED)).float() / columns**0.5


class HashedTable:
    """The rows of one rank.

    Args:
        columns: numbers of a row.

    Attributes:
        rows: [capacity, columns]; those without an id have no meaning.
        squares: [capacity], Adagrad's state: the sum of the mean squared gradients.
        last_used: [capacity] int64, the last step in which the row was asked for.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows, self.squares = torch.empty(0, columns), torch.empty(0)
        self.last_used = torch.empty(0, dtype=torch.int64)
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def look_up(self, ids: Tensor, step: int) -> Tensor:
        """The rows of ids, [n, columns]; new ids get a row."""
        self._insert(torch.unique(ids))
        slots = self._slots(ids)
        self.last_used[slots] = step
        return self.rows[slots]

    def peek(self, ids: Tensor) -> Tensor:
        """The rows of ids, [n, columns], of unknown ones what they would start with; nothing changes."""
        found = first_values(ids, self.columns)
        is_known = torch.tensor([id in self._slot_of for id in ids.tolist()], dtype=torch.bool)
        found[is_known] = self.rows[self._slots(ids[is_known])]
        return found

    def update(self, ids: Tensor, gradients: Tensor, lr: float) -> None:
        """Take one step; the gradients of an id that occurs several times are summed in order of occurrence."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        sums = torch.zeros(len(unique), self.columns).index_add_(0, inverse, gradients)
        slots = self._slots(unique)
        self.squares[slots] += sums.square().mean(dim=1)
        self.rows[slots] -= lr * sums / (self.squares[slots].sqrt() + _EPSILON).unsqueeze(1)

    def evict(self, unused_since: int) -> int:
        """Forget ids that were last asked for before a step; how many there were."""
        old = [id for id, slot in self._slot_of.items() if self.last_used[slot] < unused_since]
        self._free += [self._slot_of.pop(id) for id in old]
        return len(old)

    def state(self) -> dict[str, Tensor]:
        """All that it knows, in order of the ids."""
        ids = torch.tensor(sorted(self._slot_of), dtype=torch.int64)
        slots = self._slots(ids)
        return {
            "ids": ids,
            "rows": self.rows[slots],
            "squares": self.squares[slots],
            "last_used": self.last_used[slots],
        }

    def add(self, state: dict[str, Tensor]) -> None:
        """Take rows of a `state`."""
        self._insert(state["ids"])
        slots = self._slots(state["ids"])
        self.rows[slots], self.squares[slots] = state["rows"], state["squares"]
        self.last_used[slots] = state["last_used"]

    def _slots(self, ids: Tensor) -> Tensor:
        return torch.tensor([self._slot_of[id] for id in ids.tolist()], dtype=torch.int64)

    def _insert(self, ids: Tensor) -> None:
        new = torch.tensor([id for id in ids.tolist() if id not in self._slot_of], dtype=torch.int64)
        self._grow(len(new))
        slots = [self._free.pop() for _ in range(len(new))]
        self._slot_of.update(zip(new.tolist(), slots, strict=True))
        where = torch.tensor(slots, dtype=torch.int64)
        self.rows[where], self.squares[where] = first_values(new, self.columns), 0.0

    def _grow(self, needed: int) -> None:
        """Have so many free slots; twice the capacity at least, so that rows are rarely copied."""
        capacity, missing = len(self.rows), needed - len(self._free)
        if missing > 0:
            more = max(missing, capacity, 64)
            self.rows = torch.cat([self.rows, torch.empty(more, self.columns)])
            self.squares = torch.cat([self.squares, torch.empty(more)])
            self.last_used = torch.cat([self.last_used, torch.zeros(more, dtype=torch.int64)])
            self._free += range(capacity, capacity + more)
