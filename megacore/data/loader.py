"""Batches for one data-parallel rank: which samples a step takes is arithmetic, and the whole state is one number.

Microbatch j of data-parallel rank d holds the samples `consumed + (j * dp + d) * mbs + [0, mbs)`. So a step's samples
are the same for every layout, and a run resumes anywhere from `consumed_samples` alone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megacore.data.blend import SampleDataset
from megacore.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one forward pass reads.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s], the next tokens.
        loss_mask: float32 [b, s], 0 where the loss is not counted.
        index: Global number of the microbatch in the run, the same for every layout.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    index: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Microbatch:
        """The same microbatch on a device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("tokens", "labels", "loss_mask")
        }
        return replace(self, **moved)

    def pin_memory(self) -> Microbatch:
        """The same microbatch in pinned memory, which the DataLoader asks for."""
        names = ("tokens", "labels", "loss_mask")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})


class BatchLoader:
    """Iterates over steps: each gives this rank's microbatches, in order.

    Args:
        dataset: Samples by global number; as many as the run takes.
        micro_batch_size: Samples of a microbatch.
        global_batch_size: Samples of a step, over all ranks.
        dp_rank: This rank's number among those that share the samples.
        dp_size: Their number.
        consumed_samples: Where to begin.
        num_workers: Processes that read ahead; 0 reads in this process.
        pin_memory: Whether workers' microbatches are copied to pinned memory.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert global_batch_size % (micro_batch_size * dp_size) == 0
        assert 0 <= dp_rank < dp_size
        self.consumed_samples = consumed_samples
        self.num_microbatches = global_batch_size // (micro_batch_size * dp_size)
        self._global_batch_size = global_batch_size
        steps = max(0, len(dataset) - consumed_samples) // global_batch_size
        view = _RankView(dataset, micro_batch_size, steps * self.num_microbatches)
        view.place(consumed_samples, dp_rank, dp_size)
        self._microbatches: Iterator[Microbatch | _Unusable]
        if num_workers == 0:
            self._microbatches = (view[position] for position in range(len(view)))
        else:
            loader = DataLoader(
                view,
                batch_size=None,
                shuffle=False,
                num_workers=num_workers,
                pin_memory=pin_memory,
                worker_init_fn=_leave_signals_to_the_rank,
            )
            self._microbatches = iter(loader)

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> list[Microbatch]:
        """This rank's microbatches of the next step.

        Raises:
            StopIteration: The dataset has no samples for another step.
            DataError: A sample cannot be used.
        """
        step = []
        for _ in range(self.num_microbatches):
            microbatch = next(self._microbatches)
            if isinstance(microbatch, _Unusable):
                raise DataError(microbatch.message)
            step.append(microbatch)
        self.consumed_samples += self._global_batch_size
        return step


@dataclass(frozen=True, kw_only=True)
class _Unusable:
    """Returned by a worker for a sample that raises: DataLoader would wrap an exception's message in a traceback."""

    message: str


class _RankView(Dataset[Microbatch | _Unusable]):
    """The microbatches of one rank from a point on, by position."""

    def __init__(self, dataset: SampleDataset, micro_batch_size: int, length: int) -> None:
        self._dataset, self._size, self._length = dataset, micro_batch_size, length
        self._consumed, self._dp_rank, self._dp_size = 0, 0, 1

    def place(self, consumed: int, dp_rank: int, dp_size: int) -> None:
        self._consumed, self._dp_rank, self._dp_size = consumed, dp_rank, dp_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Microbatch | _Unusable:
        first = self._consumed + (position * self._dp_size + self._dp_rank) * self._size
        try:
            samples = [self._dataset[first + i] for i in range(self._size)]
        except DataError as error:
            return _Unusable(message=str(error))
        stacked = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
        return Microbatch(**stacked, index=first // self._size)


def _leave_signals_to_the_rank(worker: int) -> None:
    """A worker is forked with its rank's handlers: an interrupt of the terminal is the rank's to answer."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
