"""A worker's side: pull values from the servers that own them, push updates to every server that holds a copy.

An update counts as pushed when both holders of its keys have added it. So if one of them dies, whatever any worker has
pushed is on the other. (Li et al. 2014, section 4.3, let the owner forward updates to its replica, which saves the
worker's bandwidth; what is on two servers, and when, is the same.)
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Client, Connection

import torch
from torch import Tensor

from hash_ring import HashRing
from messages import Message, receive, send

Address = tuple[str, int]


class KeysLost(Exception):
    """All servers that held some keys are dead."""


class ParameterClient:
    """The parameters of all servers, as one worker sees them.

    Args:
        addresses: of the servers, by number.
        secret: that the servers expect.
        worker: number of this worker.
        keys: how many keys there are.

    Attributes:
        clock: how often this worker has pushed.
        largest_lag: the most pushes that pulled values lacked of the slowest worker.
        dead: servers that were found dead.
    """

    def __init__(self, addresses: Mapping[int, Address], secret: bytes, *, worker: int, keys: int) -> None:
        self._connections = {server: Client(address, authkey=secret) for server, address in sorted(addresses.items())}
        self._worker = worker
        ring = HashRing(addresses)
        self._holders = [ring.holders(key, keys) for key in range(keys)]
        self.clock = self.largest_lag = 0
        self.dead: set[int] = set()

    def pull(self) -> Tensor:
        """The values of all keys, [keys, width]; waits where the consistency model says so.

        Raises:
            KeysLost: both holders of a key are dead.
        """
        found: dict[int, Tensor] = {}
        while missing := [key for key in range(len(self._holders)) if key not in found]:
            by_owner: dict[int, list[int]] = {}
            for key in missing:
                by_owner.setdefault(self._living(key)[0], []).append(key)
            requests = {server: {"keys": torch.tensor(keys)} for server, keys in by_owner.items()}
            for server, reply in self._ask("pull", requests).items():
                found |= dict(zip(by_owner[server], reply.tensors["values"], strict=True))
                self.largest_lag = max(self.largest_lag, reply.numbers["lag"])
        return torch.stack([found[key] for key in range(len(self._holders))])

    def push(self, updates: Tensor) -> None:
        """Add updates, [keys, width], to the values on every server that holds them; returns when all have.

        Raises:
            KeysLost: both holders of a key are dead.
        """
        self.clock += 1
        by_holder: dict[int, list[int]] = {}
        for key in range(len(updates)):
            for server in self._living(key):
                by_holder.setdefault(server, []).append(key)
        requests = {
            server: {"keys": torch.tensor(keys), "updates": updates[keys]} for server, keys in by_holder.items()
        }
        self._ask("push", requests)
        for key in range(len(updates)):
            self._living(key)

    def close(self) -> None:
        """Leave; nobody waits for this worker any more."""
        for connection in self._connections.values():
            connection.close()

    def _living(self, key: int) -> list[int]:
        living = [server for server in self._holders[key] if server not in self.dead]
        if not living:
            raise KeysLost(f"key {key} was on servers {self._holders[key]}, which are dead")
        return living

    def _ask(self, kind: str, requests: Mapping[int, dict[str, Tensor]]) -> dict[int, Message]:
        """Send all requests, then collect the answers; a server that does not answer is dead.

        Every worker goes through the servers in the same order. A server that waits for a worker to read would
        otherwise hold up another worker, for which another server waits, and so on round in a circle.
        """
        for server in sorted(requests):
            try:
                send(self._connections[server], kind, requests[server], worker=self._worker, clock=self.clock)
            except OSError:
                self._bury(server)
        answers = {}
        for server in sorted(requests.keys() - self.dead):
            try:
                answers[server] = receive(self._connections[server])
            except (EOFError, OSError):
                self._bury(server)
        return answers

    def _bury(self, server: int) -> None:
        self.dead.add(server)
        connection: Connection = self._connections.pop(server)
        connection.close()
