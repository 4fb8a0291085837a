"""A server: it holds ranges of keys, adds up what workers push, and answers pulls when the consistency model allows it.

A key is a row of `width` parameters. Each key has a vector clock: for every worker the number of the last push that its
value contains. Clocks serve three ends (Li et al. 2014, section 4.1): they show how old a value is, a push that
arrives twice counts once, and they prove afterwards that nothing was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait

import torch
from torch import Tensor

from messages import Message, receive, send

ASYNCHRONOUS = 2**40  # a staleness that no worker reaches


class Server:
    """Values and clocks of the keys that one server holds.

    Args:
        keys: [k] int64, those that it holds.
        values: [k, width] fp64: in such sums the order of the pushes hardly shows.
        workers: how many there are.
        staleness: how many pushes a value may lack of those that its reader has made. 0: bulk-synchronous; more:
            stale-synchronous (Ho et al. 2013); `ASYNCHRONOUS`: no worker ever waits.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, workers: int, staleness: int) -> None:
        self.values, self.staleness = values.clone(), staleness
        self.clocks = torch.zeros(len(keys), workers, dtype=torch.int64)
        self._present = list(range(workers))
        self._row_of = {key: row for row, key in enumerate(keys.tolist())}
        self._held_back: dict[int, Tensor] = {}  # by clock

    def push(self, worker: int, clock: int, keys: Tensor, updates: Tensor) -> None:
        """Add push number `clock` of a worker to the values of these keys, unless they contain it.

        Bulk-synchronous training holds it back until all workers have pushed as often. A slow worker would otherwise
        read a value that already contains the next step of a fast one.
        """
        rows = self._rows(keys)
        is_new = self.clocks[rows, worker] < clock
        target = self.values
        if self.staleness == 0:
            target = self._held_back.setdefault(clock, torch.zeros_like(self.values))
        target.index_add_(0, rows[is_new], updates[is_new])
        self.clocks[rows[is_new], worker] = clock
        self._release()

    def leave(self, worker: int) -> None:
        """Wait no longer for a worker that has ended or died."""
        if worker in self._present:
            self._present.remove(worker)
        self._release()

    def pull(self, keys: Tensor, clock: int) -> Tensor | None:
        """The values for a worker that has pushed `clock` times; None while they are too old."""
        return None if self.lag(keys, clock) > self.staleness else self.values[self._rows(keys)]

    def lag(self, keys: Tensor, clock: int) -> int:
        """How many pushes the slowest worker is behind one that has pushed `clock` times."""
        clocks = self.clocks[self._rows(keys)][:, self._present]
        return max(0, clock - int(clocks.min())) if clocks.numel() else 0

    def _release(self) -> None:
        """Add the updates that were held back to those values to which all workers have pushed them."""
        for clock in sorted(self._held_back):
            is_complete = (self.clocks[:, self._present] >= clock).all(dim=1)
            self.values[is_complete] += self._held_back[clock][is_complete]
            self._held_back[clock][is_complete] = 0
            if is_complete.all():
                del self._held_back[clock]

    def _rows(self, keys: Tensor) -> Tensor:
        return torch.tensor([self._row_of[key] for key in keys.tolist()])


@dataclass(frozen=True)
class Waiting:
    """A pull that cannot be answered yet."""

    connection: Connection
    keys: Tensor
    clock: int


def serve(server: Server, listener: Listener, workers: int, *, dies_at: int | None = None) -> bool:
    """Answer workers until all have left.

    Args:
        server: holds the keys.
        listener: where workers connect; closed at the end.
        workers: how many will connect.
        dies_at: number of the push at which the server vanishes, after it has added the push and before it has said so,
            which is the worst moment; None: it does not.

    Returns:
        Whether it lived to the end.
    """
    connections = [listener.accept() for _ in range(workers)]
    names: dict[Connection, int] = {}
    waiting: list[Waiting] = []
    try:
        while connections:
            for connection in wait(connections):
                assert isinstance(connection, Connection)
                try:
                    message = receive(connection)
                except (EOFError, OSError):  # the worker has ended, or died
                    connections.remove(connection)
                    server.leave(names.get(connection, -1))
                    continue
                names[connection] = message.numbers["worker"]
                if message.kind == "pull":
                    waiting.append(Waiting(connection, message.tensors["keys"], message.numbers["clock"]))
                    continue
                _add(server, message)
                if dies_at is not None and message.numbers["clock"] >= dies_at:
                    return False
                send(connection, "done")
            waiting = [pull for pull in waiting if pull.connection in connections and not _answered(server, pull)]
        return True
    finally:
        listener.close()
        for connection in connections:
            connection.close()


def _add(server: Server, message: Message) -> None:
    tensors, numbers = message.tensors, message.numbers
    server.push(numbers["worker"], numbers["clock"], tensors["keys"], tensors["updates"])


def _answered(server: Server, pull: Waiting) -> bool:
    values = server.pull(pull.keys, pull.clock)
    if values is not None:
        send(pull.connection, "values", {"values": values}, lag=server.lag(pull.keys, pull.clock))
    return values is not None
