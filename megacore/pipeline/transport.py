"""Point-to-point transfers between pipeline ranks: the only module that sends and receives. All transfers of one call
are posted together, and none is waited for until its tensor is needed. Both ranks post the messages between them in the
same order (schedule.py), which is all that NCCL needs. A sent tensor is kept until its transfer is done: freeing it
earlier corrupts data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.heartbeat import Phase, post
from megacore.parallel.mesh import Group
from megacore.pipeline.stage import TensorSpec


@dataclass(frozen=True)
class Send:
    """Send the tensors to pipeline rank `peer`; there may be none."""

    peer: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Receive:
    """Receive tensors of these specs from pipeline rank `peer`; there may be none."""

    peer: int
    specs: tuple[TensorSpec, ...]


Transfer = Send | Receive


@dataclass(frozen=True)
class _Posted:
    """A posted transfer: its range of the posted operations, and its tensors."""

    first: int
    stop: int
    tensors: tuple[Tensor, ...]
    is_receive: bool
    watched: AbstractContextManager[Any]


class Arrival:
    """Tensors that are being received. `tensors`: to be filled. `watched`: marks the wait for the watchdog."""

    def __init__(
        self, tensors: tuple[Tensor, ...], works: list[dist.Work], watched: AbstractContextManager[Any]
    ) -> None:
        self._tensors, self._works, self._watched = tensors, works, watched

    def wait(self) -> tuple[Tensor, ...]:
        if self._works:
            with self._watched:
                for work in self._works:
                    work.wait()
        self._works = []
        return self._tensors


class Transport:
    """Sends and receives along a pipeline."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self._sending: deque[tuple[list[dist.Work], _Posted]] = deque()
        me = group.ranks[group.rank]
        self._to, self._from = [(me, peer) for peer in group.ranks], [(peer, me) for peer in group.ranks]

    def post(self, transfers: Sequence[Transfer]) -> list[Arrival]:
        """Begin all transfers at once. Returns one for each receive, in order."""
        operations: list[dist.P2POp] = []
        posted: list[_Posted] = []
        for transfer in transfers:
            receives = isinstance(transfer, Receive)
            tensors = (
                tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in transfer.specs)
                if isinstance(transfer, Receive)
                else tuple(tensor.resolve_conj().resolve_neg().contiguous() for tensor in transfer.tensors)
            )
            call, peer = dist.irecv if receives else dist.isend, self.group.ranks[transfer.peer]
            first = len(operations)
            operations += [dist.P2POp(call, _as_real(tensor), peer, group=self.group.handle) for tensor in tensors]
            kind, pairs = (Phase.RECEIVE, self._from) if receives else (Phase.SEND, self._to)
            watched = post(kind, pairs[transfer.peer], sum(tensor.nbytes for tensor in tensors))
            posted.append(_Posted(first, len(operations), tensors, receives, watched))
        works = dist.batch_isend_irecv(operations) if operations else []
        coalesced = len(works) < len(operations)  # NCCL makes one piece of work of a batch
        arrivals = []
        for item in posted:
            awaited = works if coalesced else works[item.first : item.stop]
            if item.is_receive:
                arrivals.append(Arrival(item.tensors, awaited, item.watched))
            else:
                self._sending.append((awaited, item))
        while self._sending and all(work.is_completed() for work in self._sending[0][0]):  # their tensors are freed
            for work in self._sending.popleft()[0]:
                work.wait()
        return arrivals

    def drain(self) -> None:
        while self._sending:
            works, sent = self._sending.popleft()
            with sent.watched:
                for work in works:
                    work.wait()


def _as_real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: some backends send no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
