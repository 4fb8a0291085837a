"""Collectives and point-to-point transfers of the pretend accelerator: NCCL's rules, gloo's bytes.

A communicator takes contiguous tensors of the rank's own device and nothing else, runs its calls in order, ignores
tags, and returns before the work is done: `wait()` puts what the current stream does next behind it, and anything that
touches the tensors without that is a RuntimeError. `batch_isend_irecv` is one call, with one piece of work, as on NCCL.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from benchmarks.gpu_check.one_device import GlooGroup
from megacore.parallel.graphs import Recorded
from tests.accelerator.device import caller, library
from tests.accelerator.order import Call, Message, Order

Tensors = Sequence[Tensor]
Starts = Callable[[], list[dist.Work]]
_DRAIN_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)
_communicators: list[Communicator] = []


class Work:
    """A call under way.

    Args:
        communicator: what runs it.
        tick: its number on the communicator's timeline.
        parts: gloo's pieces of it.
        waits_on_host: the host itself waits, as it does at a barrier.
    """

    def __init__(self, communicator: Communicator, tick: int, parts: list[dist.Work], waits_on_host: bool) -> None:
        self.tick, self.parts = tick, parts
        self._communicator, self._waits_on_host = communicator, waits_on_host

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Put what the current stream does from now on behind this call and those before it."""
        with _disable_current_modes():  # gloo may copy now
            self._communicator.finish(self.tick)
        library().pretend_stream_waits(self._communicator.timeline, self.tick)
        if self._waits_on_host:
            library().pretend_count_sync(b"a barrier")
            library().pretend_host_waits(self._communicator.timeline, self.tick)
        return True

    def is_completed(self) -> bool:
        """Whether this call and those before it are done; if so, the host may rely on it."""
        done = self._communicator.has_finished(self.tick)
        if done:
            library().pretend_host_waits(self._communicator.timeline, self.tick)
        return done

    is_success = is_completed

    def exception(self) -> None:
        return None


class Communicator(GlooGroup):
    """What torch makes a process group of: `init_process_group("pretend")`, `new_group()`."""

    backend, kind = "pretend", "pretend"
    supports_coalescing = True

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options, _)
        self.timeline = int(library().pretend_new_timeline())
        ranks = options.global_ranks_in_group or range(options.group_size)
        members = ", ".join(map(str, ranks))
        names = [f"rank {one} of the group of ranks {members}" for one in ranks]
        self._order = Order(options.store, options.group_rank, names)
        self._under_way: deque[Work] = deque()
        self._lock = threading.RLock()
        self._batch: list[tuple[Message, Tensor]] | None = None
        _communicators.append(self)

    def shutdown(self) -> None:
        if self in _communicators:
            _communicators.remove(self)
            self._order.close()

    # ---- work under way

    def finish(self, tick: int) -> None:
        """Return once the calls up to this one are done."""
        with self._lock:
            while self._under_way and self._under_way[0].tick <= tick:
                for part in self._under_way[0].parts:
                    part.wait()
                self._under_way.popleft()

    def has_finished(self, tick: int) -> bool:
        with self._lock:
            return all(part.is_completed() for work in self._under_way if work.tick <= tick for part in work.parts)

    def drain(self) -> None:
        """Return once every call is done, and the host knows."""
        with self._lock:
            last = self._under_way[-1].tick if self._under_way else 0
        self.finish(last)
        library().pretend_host_waits(self.timeline, last)

    def _start(self, call: Call, reads: Tensors, writes: Tensors, start: Starts, *, waits_on_host: bool) -> Work:
        if isinstance(graph := _get_current_dispatch_mode(), Recorded):
            return graph.message(partial(self._start, call, reads, writes, start, waits_on_host=waits_on_host), writes)
        for tensor in (*reads, *writes):
            _check(tensor, call)
        with self._lock:
            self._order.call(call)
            tick = torch.ops.pretend.begin(list(reads), list(writes), self.timeline, f"{call}")
            work = Work(self, tick, start(), waits_on_host)
            self._under_way.append(work)
            return work

    def _collective(self, name: str, reads: Tensors, writes: Tensors, start: Callable[[], dist.Work]) -> Work:
        """Start a collective; `name` says what must be the same on every rank."""
        call = Call(collective=name, where=caller())
        return self._start(call, reads, writes, lambda: [start()], waits_on_host=name == "barrier")

    # ---- collectives

    def _on_hosts(self, run: Any, *arguments: Any) -> Any:
        """Give gloo the tensors' memory."""
        return run(*map(_host, arguments))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        name = f"all_reduce({_reduction(opts)}, {_form(tensors)})"
        return self._collective(name, tensors, tensors, partial(self._on_hosts, self._gloo.allreduce, tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        name = f"broadcast(from {opts.rootRank}, {_form(tensors)})"
        reads, writes = (tensors, []) if opts.rootRank == self.rank() else ([], tensors)
        return self._collective(name, reads, writes, partial(self._on_hosts, self._gloo.broadcast, tensors, opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        name = f"reduce({_reduction(opts)}, to {opts.rootRank}, {_form(tensors)})"
        return self._collective(name, tensors, tensors, partial(self._on_hosts, self._gloo.reduce, tensors, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        name, opts = f"all_gather({_form(inputs)})", opts or dist.distributed_c10d.AllgatherOptions()
        start = partial(self._on_hosts, self._gloo.allgather, [outputs[0]], inputs, opts)
        return self._collective(name, inputs, outputs[0], start)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        start = partial(self._on_hosts, self._gloo._allgather_base, output, input, opts)
        return self._collective(f"all_gather_into_tensor({_form([input])})", [input], [output], start)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        start = partial(self._on_hosts, self._gloo._reduce_scatter_base, output, input, opts)
        name = f"reduce_scatter_tensor({_reduction(opts)}, {_form([input])})"
        return self._collective(name, [input], [output], start)

    def all_to_all_single(self, output: Tensor, input: Tensor, *sizes_and_options: Any) -> Work:
        start = partial(self._on_hosts, self._gloo.alltoall_base, output, input, *sizes_and_options)
        return self._collective(f"all_to_all({input.dtype})", [input], [output], start)

    # torch before 2.13 calls them by these names.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any) -> Work:
        return self._collective("barrier", [], [], lambda: self._gloo.barrier(dist.BarrierOptions()))

    # ---- point to point

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work | None:
        return self._message(Message(True, to, _form(tensors)), tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work | None:
        return self._message(Message(False, source, _form(tensors)), tensors[0])

    def _message(self, message: Message, tensor: Tensor) -> Work | None:
        if self._batch is not None:
            self._batch.append((message, tensor))
            return None
        return self._exchange([(message, tensor)])

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._batch is None, "a batch within a batch"
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch, None
        assert batch is not None
        return self._exchange(batch)

    def _exchange(self, batch: list[tuple[Message, Tensor]]) -> Work:
        def start() -> list[dist.Work]:
            receives = [self._gloo.recv([_host(to)], message.peer, 0) for message, to in batch if not message.sends]
            return receives + [self._gloo.send([_host(of)], message.peer, 0) for message, of in batch if message.sends]

        call = Call(messages=[message for message, _ in batch], where=caller())
        reads = [tensor for message, tensor in batch if message.sends]
        writes = [tensor for message, tensor in batch if not message.sends]
        return self._start(call, reads, writes, start, waits_on_host=False)


def register() -> None:
    """Make the device and its collectives known to torch in this process."""
    library()
    if hasattr(dist.Backend, "PRETEND"):
        return
    dist.Backend.register_backend("pretend", Communicator, extended_api=True, devices=["pretend"])
    library().pretend_on_drain(_drain)
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    # torch coalesces only for process groups of its own.
    original = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, Communicator):
            return original(operations)
        group._start_coalescing(operations[0].tensor.device)
        for one in operations:
            peer = "group_dst" if one.op is dist.isend else "group_src"
            one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
        return [group._end_coalescing(operations[0].tensor.device)]

    for module in (dist, dist.distributed_c10d):
        setattr(module, "batch_isend_irecv", batch_isend_irecv)  # noqa: B010 (no annotation allows it)


@_DRAIN_CALLBACK
def _drain() -> int:
    try:
        for communicator in list(_communicators):
            communicator.drain()
    except RuntimeError:
        return 1
    return 0


def _check(tensor: Tensor, call: Call) -> None:
    own = torch.accelerator.current_device_index()
    if tensor.device.type != "pretend":
        raise RuntimeError(f"{call}: a tensor is on {tensor.device}; the pretend accelerator takes its own only")
    if tensor.device.index != own:
        raise RuntimeError(f"{call}: a tensor is on {tensor.device}, and this rank's device is pretend:{own}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{call}: tensors must be contiguous, and one has strides {tensor.stride()}")


def _host(value: Any) -> Any:
    """The host's view of a tensor, or of those of a list; anything else as it is."""
    if isinstance(value, list) and value and isinstance(value[0], (Tensor, list)):
        return [_host(one) for one in value]
    return torch.ops.pretend.host_alias(value.detach()) if isinstance(value, Tensor) else value


def _form(tensors: Sequence[Tensor]) -> str:
    """`float32[64]`: what must be the same on every rank, whatever the shape."""
    return " + ".join(f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in tensors)


def _reduction(opts: Any) -> str:
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next(name.lower() for name in names if opts.reduceOp == getattr(dist.ReduceOp, name))
