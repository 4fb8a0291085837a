"""Messages between the ranks of a group, in rounds, with a record of who sent what.

In one round a rank sends at most one tensor and receives at most one, both at the same time. Thakur, Rabenseifner and
Gropp 2005 ("Optimization of collective communication operations in MPICH") count the cost of a collective in such
rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import Group


@dataclass(frozen=True)
class Message:
    """One tensor on its way from one rank to another."""

    round: int
    source: int
    destination: int
    nbytes: int
    content: str


class Wire:
    """Sends and receives between the ranks of a group.

    Attributes:
        rank: this rank's position in the group.
        size: number of ranks.
        rounds: how many rounds have passed.
        sent: the messages of this rank.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.rounds = 0
        self.sent: list[Message] = []

    def round(
        self,
        *,
        send: Tensor | None = None,
        to: int = 0,
        content: str = "",
        receive: Tensor | None = None,
        source: int = 0,
    ) -> None:
        """Take part in one round; without `send` and `receive` this rank only counts it.

        Args:
            send: contiguous; None or empty: nothing.
            to: the rank that gets it.
            content: what it is, for the picture.
            receive: contiguous, to be overwritten; None or empty: nothing.
            source: the rank that it comes from.
        """
        transfers = []
        if send is not None and send.numel():
            transfers.append(self._transfer(dist.isend, send, to))
            self.sent.append(Message(self.rounds, self.rank, to, send.nbytes, content))
        if receive is not None and receive.numel():
            transfers.append(self._transfer(dist.irecv, receive, source))
        # Posted together: two ranks that send to each other would otherwise both wait for the other to receive.
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        self.rounds += 1

    def _transfer(self, call: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(call, tensor, self._group.ranks[peer], group=self._group.handle)
