"""Point-to-point transfers between neighbouring stages: the only place that sends and receives.

All transfers of one call are posted together, in the order given, so that two neighbours that post matching lists
cannot block each other, on gloo or NCCL. A sent tensor is kept until its transfer is done: freeing it earlier
corrupts data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import Group


@dataclass(frozen=True)
class Transfer:
    """Send `tensor` to stage `peer`, or, without a tensor, receive from it."""

    peer: int
    tensor: Tensor | None = None


class Transport:
    """Sends and receives tensors of one fixed shape along a pipeline.

    Args:
        group: the pipeline group.
        shape: shape of every tensor that crosses a stage boundary.
        dtype: its dtype.
        device: where tensors live.
    """

    def __init__(self, group: Group, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._shape, self._dtype, self._device = group, shape, dtype, device
        self._sending: deque[tuple[dist.Work, Tensor | None]] = deque()

    def exchange(self, transfers: Sequence[Transfer]) -> list[Tensor]:
        """Post all transfers at once and wait for those that receive.

        Returns:
            The received tensors, in the order of their transfers.
        """
        operations, received = [], []
        for transfer in transfers:
            operation = dist.irecv if transfer.tensor is None else dist.isend
            tensor = (
                torch.empty(self._shape, dtype=self._dtype, device=self._device)
                if transfer.tensor is None
                else transfer.tensor
            )
            if transfer.tensor is None:
                received.append(tensor)
            peer = self._group.ranks[transfer.peer]
            operations.append(dist.P2POp(operation, tensor, peer, group=self._group.handle))
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL coalesces a batch into one piece of work
            for work in works:
                work.wait()
            return received
        for work, transfer in zip(works, transfers, strict=True):
            if transfer.tensor is None:
                work.wait()
            else:
                self._sending.append((work, transfer.tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()[0].wait()
        return received

    def drain(self) -> None:
        """Wait until everything sent has left."""
        while self._sending:
            self._sending.popleft()[0].wait()
