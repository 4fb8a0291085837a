"""Which servers hold which keys: consistent hashing (Li et al. 2014, "Scaling Distributed Machine Learning with the
Parameter Server", section 4.3).

Keys lie in order on a ring, and every server takes several random points of it. A key belongs to the server of the
first point at or after it, so a server holds ranges of keys. Where a server joins or leaves, only the ranges next to
its points move. The second holder of a key is the next other server on the ring: exactly the one that the key would
belong to without the first.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable

RING = 2**64


class HashRing:
    """The ring of some servers.

    Args:
        servers: their numbers.
        points: of each server; more of them make the shares more equal.
    """

    def __init__(self, servers: Iterable[int], points: int = 64) -> None:
        self._points = sorted((_random_position(server, i), server) for server in servers for i in range(points))
        self._positions = [position for position, _ in self._points]
        self.servers = {server for _, server in self._points}

    def holders(self, key: int, keys: int, copies: int = 2) -> tuple[int, ...]:
        """The servers that hold a key, the owner first; fewer than `copies` where there are fewer servers.

        Args:
            key: its number.
            keys: how many keys there are.
            copies: how many servers hold each.
        """
        start = bisect_left(self._positions, key * RING // keys)
        found: list[int] = []
        for i in range(len(self._points)):
            server = self._points[(start + i) % len(self._points)][1]
            if server not in found:
                found.append(server)
            if len(found) == min(copies, len(self.servers)):
                break
        return tuple(found)


def _random_position(server: int, point: int) -> int:
    digest = hashlib.blake2b(f"server {server}, point {point}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
