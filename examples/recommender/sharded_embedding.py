"""A table of embeddings over all ranks: model parallel, while the rest of the model is data parallel.

This is the idea of HugeCTR (Wang et al. 2022, "Merlin HugeCTR", arXiv 2210.08803): tables are too large for one device,
and a batch needs few of their rows. An all-to-all brings the ids of the ranks' samples to the owners of the rows, a
second one brings the rows back, and in backward a third one brings their gradients to the owners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hashed_table import HashedTable, owners
from megacore.parallel.collectives import RowsExchanged, all_gather
from megacore.parallel.mesh import Group


@dataclass(frozen=True)
class Route:
    """How the ids of a batch travel.

    Attributes:
        order: [n], puts this rank's ids in order of their owners.
        send: how many ids go to each rank.
        receive: how many come from each rank.
        wanted: those that came, whose rows this rank holds.
    """

    order: Tensor
    send: list[int]
    receive: list[int]
    wanted: Tensor


class ShardedEmbedding:
    """Embeddings of ids, each held by one rank of the group.

    Args:
        columns: numbers of an embedding.
        group: over which the rows are divided.
    """

    def __init__(self, columns: int, group: Group) -> None:
        self.table, self.group = HashedTable(columns), group

    def route(self, ids: Tensor) -> Route:
        """Bring ids [n] to their owners. Every rank calls this together; n may differ."""
        owner = owners(ids, self.group.size)
        order = owner.argsort(stable=True)
        send = torch.bincount(owner, minlength=self.group.size)
        receive = all_gather(send, self.group)[:, self.group.rank].tolist()
        route = Route(order, send.tolist(), receive, ids)
        return Route(order, send.tolist(), receive, self._to_owners(ids, route))

    def look_up(self, route: Route, step: int) -> Tensor:
        """The embeddings of this rank's ids, [n, columns]; new ids get a row."""
        return self._to_askers(self.table.look_up(route.wanted, step), route)

    def peek(self, route: Route) -> Tensor:
        """The same, but nothing changes."""
        return self._to_askers(self.table.peek(route.wanted), route)

    def update(self, route: Route, gradients: Tensor, lr: float) -> None:
        """Take a step with the gradients of what `look_up` gave, [n, columns].

        Each occurrence of an id travels by itself, so its gradients are added in the order of the samples,
        whatever the number of ranks: the sum is the same to the last bit. (Summing on the sender first would save
        bytes, and change roundings.)
        """
        self.table.update(route.wanted, self._to_owners(gradients, route), lr)

    def _to_owners(self, rows: Tensor, route: Route) -> Tensor:
        return self._exchange(rows[route.order], route.send, route.receive)

    def _to_askers(self, rows: Tensor, route: Route) -> Tensor:
        received = self._exchange(rows, route.receive, route.send)
        result = torch.empty_like(received)
        result[route.order] = received
        return result

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return rows if self.group.size == 1 else RowsExchanged(rows, send, receive, self.group).wait()
