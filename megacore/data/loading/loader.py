"""Batches for one data-parallel rank: microbatch j of rank d holds the samples `consumed + (j * dp + d) * mbs + [0,
mbs)`. So a step's samples are the same for every layout, and `consumed_samples` is all that a run needs to resume."""

from __future__ import annotations

import multiprocessing
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megacore.data.gpt.blend import SampleDataset
from megacore.data.loading.batch import Batch
from megacore.errors import DataError, WorkerDied
from megacore.parallel.heartbeat import Phase, phase
from megacore.parallel.processors import end_with_parent

_SECONDS_FOR_A_WORKER_TO_END = 1.0

B = TypeVar("B", bound=Batch)


@dataclass(frozen=True, kw_only=True)
class Microbatch(Batch):
    """What one forward pass of a left-to-right model reads."""

    tokens: torch.Tensor  # int64 [b, s]
    labels: torch.Tensor  # int64 [b, s], the next tokens
    loss_mask: torch.Tensor  # float32 [b, s], 0 where the loss is not counted


@dataclass(frozen=True, kw_only=True)
class PackedMicrobatch(Microbatch):
    """Samples of several documents each."""

    # int64 [b, s], the number of each position's document in its sample: 1, 2, ...; padding has the next number, as if
    # it were a document.
    documents: torch.Tensor
    positions: torch.Tensor  # int64 [b, s], positions within the documents, from 0


@dataclass(frozen=True, kw_only=True)
class PaddedMicrobatch(PackedMicrobatch):
    """Samples of several documents each, and of padding at the end."""

    padding: torch.Tensor  # int64 [b, s], 1 for padding, else 0


class BatchLoader(Generic[B]):
    """Iterates over steps: each gives this rank's microbatches, in order.

    Args:
        dataset: samples by global number; as many as the run takes.
        batch_type: what the samples are stacked to; its tensors are named as the samples' arrays.
        global_batch_size: samples of a step, over all ranks; or, where they differ, those of each.
        rank: this rank's number among those that share the samples.
        num_workers: processes that read ahead; 0 reads in this process.
        pin_memory: copy microbatches to pinned memory, from which an accelerator fetches them by itself.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        batch_type: type[B],
        *,
        micro_batch_size: int,
        global_batch_size: int | Iterator[int],
        rank: int,
        ranks: int,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < ranks
        self.consumed_samples = self._first_sample = consumed_samples
        self._batch_sizes = repeat(global_batch_size) if isinstance(global_batch_size, int) else global_batch_size
        self._replica_batch_size, self._pin_memory = micro_batch_size * ranks, pin_memory
        self._view = _RankView(
            dataset=dataset,
            batch_type=batch_type,
            size=micro_batch_size,
            length=max(0, len(dataset) - consumed_samples) // self._replica_batch_size,
            consumed=consumed_samples,
            rank=rank,
            ranks=ranks,
        )
        self._readers: _Readers[B] | None = None if num_workers == 0 else _Readers(self._view, num_workers)
        self._microbatches = self._from_the_start()

    def __iter__(self) -> Iterator[list[B]]:
        return self

    def __next__(self) -> list[B]:
        """This rank's microbatches of the next step. Raises StopIteration at the end of the data, DataError for a bad
        sample, WorkerDied where a process that reads ahead has ended."""
        step: list[B] = []
        size = next(self._batch_sizes)
        assert size % self._replica_batch_size == 0
        with phase(Phase.DATA):
            for _ in range(size // self._replica_batch_size):
                microbatch = next(self._microbatches)
                if isinstance(microbatch, _Unusable):
                    raise DataError(microbatch.message)
                step.append(microbatch.pin_memory() if self._pin_memory else microbatch)
        self.consumed_samples += size
        return step

    def rewind(self) -> None:
        """Begin again where this loader began, with the same processes; its steps are of one size."""
        self.consumed_samples = self._first_sample
        self._microbatches = self._from_the_start()

    def _from_the_start(self) -> Iterator[B | _Unusable]:
        if self._readers is None:
            return (self._view[position] for position in range(len(self._view)))
        return self._readers.read()


@dataclass(frozen=True, kw_only=True)
class _Step(Generic[B]):
    """A step's microbatches on the device."""

    microbatches: list[B]
    consumed_samples: int  # of the loader once this step is done
    copied: torch.Event | None = None  # when they may be read; None: now


class DeviceLoader(Generic[B]):
    """A loader's steps on a device, where the next can be fetched while one is computed. An accelerator copies a step
    in a separate stream, beside the one that computes. On a CPU nothing runs beside the program, and a step is read
    when it is due. `loader`: on an accelerator, of pinned memory."""

    def __init__(self, loader: BatchLoader[B], device: torch.device) -> None:
        # Of the steps that were handed out, not of one that is only fetched.
        self.consumed_samples = loader.consumed_samples
        self.waited = 0.0  # seconds in which the program fetched steps
        self._loader, self._device = loader, device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._next: _Step[B] | Exception | None = None
        self.current: _Step[B] | None = None

    def __iter__(self) -> Iterator[list[B]]:
        return self

    def __next__(self) -> list[B]:
        """This rank's microbatches of the next step; the memory of the last one's is given back. Raises StopIteration,
        DataError, WorkerDied as by the loader, but not before the step is due."""
        step, self._next = self._next or self._fetch(), None
        if isinstance(step, Exception):
            raise step
        if step.copied is not None:
            step.copied.wait()  # the stream that computes does, and not the program
        # The copying stream may write to a step's memory once it is let go, whether the computing one has read it or
        # not. So it is held until the next is due: by then the program has waited for the gradients of this one.
        self.current, self.consumed_samples = step, step.consumed_samples
        return step.microbatches

    def prefetch(self) -> None:
        """Fetch the next step, to be called once the accelerator has work to do; what fails is raised when it is
        due."""
        if self._stream is None or self._next is not None:
            return
        try:
            self._next = self._fetch()
        except Exception as error:
            self._next = error

    def _fetch(self) -> _Step[B]:
        since = time.perf_counter()
        microbatches = next(self._loader)
        self.waited += time.perf_counter() - since
        if self._stream is None:
            return _Step(microbatches=microbatches, consumed_samples=self._loader.consumed_samples)
        with self._stream:
            moved = [microbatch.to(self._device, non_blocking=True) for microbatch in microbatches]
            copied = self._stream.record_event()
        return _Step(microbatches=moved, consumed_samples=self._loader.consumed_samples, copied=copied)


@dataclass(frozen=True, kw_only=True)
class _Unusable:
    """Returned by a worker for a sample that raises: DataLoader would wrap an exception's message in a traceback."""

    message: str


@dataclass(frozen=True, kw_only=True)
class _RankView(Dataset[B | _Unusable], Generic[B]):
    """The microbatches of one rank from a point on, by position."""

    dataset: SampleDataset
    batch_type: type[B]
    size: int
    length: int
    consumed: int
    rank: int
    ranks: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> B | _Unusable:
        first = self.consumed + (position * self.ranks + self.rank) * self.size
        try:
            samples = [self.dataset[first + i] for i in range(self.size)]
        except DataError as error:
            return _Unusable(message=str(error))
        stacked = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
        return self.batch_type(**stacked, index=first // self.size)


class _Readers(Generic[B]):
    """The processes that read a view ahead, and the watch over them."""

    def __init__(self, view: _RankView[B], count: int) -> None:
        self._loader = DataLoader(
            view,
            batch_size=None,
            shuffle=False,
            num_workers=count,
            persistent_workers=True,
            worker_init_fn=_belong_to_the_rank,
            generator=torch.Generator(),  # draws seeds for the workers, which need none; by default from everybody's
        )
        self._processes: list[BaseProcess] = []
        # The iterator ends its processes when it is deleted, by messages. A cycle of references that holds it would be
        # collected together with the queues that carry these messages, and the processes would stay. A finalizer keeps
        # the iterator out of such cycles until its `_Readers` is gone.
        self._iterator: list[Iterator[B | _Unusable]] = []
        weakref.finalize(self, self._iterator.clear).atexit = False  # at exit, DataLoader ends them itself

    def read(self) -> Iterator[B | _Unusable]:
        """Begin to read from position 0, at once; the processes are started the first time. Raises WorkerDied where by
        the iterator, where a process has ended."""
        others, handler = multiprocessing.active_children(), signal.getsignal(signal.SIGCHLD)
        microbatches = iter(self._loader)
        self._iterator[:] = [microbatches]
        self._processes += [process for process in multiprocessing.active_children() if process not in others]
        if signal.getsignal(signal.SIGCHLD) is not handler:
            # DataLoader's handler raises wherever the program happens to be. Without it, the next microbatch says so.
            signal.signal(signal.SIGCHLD, handler)
        return self._watched(microbatches)

    def _watched(self, microbatches: Iterator[B | _Unusable]) -> Iterator[B | _Unusable]:
        try:
            yield from microbatches
        except Exception as error:  # a connection that breaks off fails in many ways, and a sample in any
            ended = wait([process.sentinel for process in self._processes], _SECONDS_FOR_A_WORKER_TO_END)
            dead = [process for process in self._processes if process.sentinel in ended]
            if not dead:
                raise
            dead[0].join(_SECONDS_FOR_A_WORKER_TO_END)  # it closes its files a moment before it counts as ended
            code = dead[0].exitcode or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise WorkerDied(
                f"a data worker (pid {dead[0].pid}) {how}, perhaps for lack of memory: use fewer --num-workers, "
                "or 0 to read in the training process"
            ) from error


def _belong_to_the_rank(worker: int) -> None:
    """A worker is forked with its rank's handlers: what ends the job is the rank's to answer, which still needs its
    workers for the step that it is in. A worker ends with its rank, however that ends: torch's DataLoader looks only
    every five seconds whether the rank lives."""
    # It is the rank's pipe: a signal to a worker would wake the rank.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
