"""Where a block's activations are kept between forward and backward: in host memory, or divided over the layer group.

Offload (Rhu et al. 2016, arXiv 1602.08124): what autograd keeps of a block is copied to pinned host memory on a stream
of its own while the next block computes. The device holds the activations of two blocks at a time. Backward fetches
those of a block while it computes with those of the block after it. Before it fetches the first ones of a microbatch,
those of the last forward are freed. Where backward is split, its first half does not use up the inputs of products.
They are freed when the next block comes, and fetched again for the gradients of weights.

Division (Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1): the input of a recomputed block is the same on all
ranks of the layer group. Each keeps one part, and backward gathers them.

Both hand back the bits that were kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megacore.parallel import host_copies
from megacore.parallel.collectives import all_gather
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.random import RandomStreams

_LEAST_BYTES = 4096
"""Smaller tensors stay on the device: a copy takes longer to start than to run."""


class Kept(nn.Module):
    """A block, part of whose activations are kept elsewhere. `offload`: takes them to host memory; None: they stay on
    the device. `group`: divides the input, which is the same on all of its ranks; of one rank: nothing is divided.
    `is_first`: whether the block is the first of its stage."""

    def __init__(self, layer: nn.Module, offload: Offload | None, *, group: Group = ALONE, is_first: bool) -> None:
        super().__init__()
        self.layer, self._offload, self._group, self._is_first = layer, offload, group, is_first
        # Tables that many blocks read, such as the angles of rotary positions, stay where they are.
        self._shared = [found for m in layer.modules() if (found := getattr(m, "shared_tensors", None)) is not None]

    def forward(self, x: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.layer(x)
        with self._keeping(x):
            return self.layer(x)

    @contextmanager
    def _keeping(self, x: Any) -> Iterator[None]:
        hidden, *others = x if isinstance(x, tuple) else (x,)
        tables = (tensor for shared in self._shared for tensor in shared())
        remaining = {_memory(tensor) for tensor in (*self.layer.parameters(), *self.layer.buffers(), *others, *tables)}
        divided = _memory(hidden) if self._group.size > 1 else None
        block = None if self._offload is None else self._offload.begin(first=self._is_first)

        def pack(tensor: Tensor) -> Tensor | _Put:
            memory = _memory(tensor)
            if memory in remaining or tensor.device.type == "cpu":
                return tensor
            whole = None
            if memory == divided and tensor.numel() % self._group.size == 0:
                whole = tensor.shape
                tensor = tensor.reshape(-1).chunk(self._group.size)[self._group.rank].clone()
            if block is not None and tensor.untyped_storage().nbytes() >= _LEAST_BYTES:
                return _Put(block.put(tensor), whole)
            return tensor if whole is None else _Put(tensor, whole)

        def unpack(packed: Tensor | _Put) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            tensor = packed.kept if isinstance(packed.kept, Tensor) else packed.kept.fetched()
            return tensor if packed.whole is None else all_gather(tensor, self._group).view(packed.whole)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        if block is not None:
            block.send()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Put(NamedTuple):
    """A kept tensor, or where it is kept."""

    kept: Tensor | _View  # the tensor, or a part of it
    whole: torch.Size | None  # shape of the tensor of which this rank keeps a part; None: it keeps all of it


class _View(NamedTuple):
    """A tensor in memory that is kept elsewhere."""

    memory: _Memory
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetched(self) -> Tensor:
        return self.memory.take().as_strided(self.shape, self.stride, self.offset)


class _Memory:
    """What several kept tensors may share."""

    def __init__(self, block: _Block, device: Tensor) -> None:
        self.device: Tensor | None = device  # the numbers on the device, flat, while they are there
        self.host: Tensor | None = None  # those in host memory, once they are sent
        self.is_wanted = True  # whether they are fetched with their block: until every view has had them once
        self._block, self._size, self._dtype = block, device.numel(), device.dtype
        self.views = self._taken = 0  # of it, and those that have had the numbers

    def take(self) -> Tensor:
        """The numbers on the device, which are fetched if need be; given away when every view has had them."""
        self._block.arrive(self)
        data = self.device
        assert data is not None
        self._taken += 1
        if self._taken == self.views:
            self.device, self.is_wanted, self._taken = None, False, 0  # a split backward may take them again
        return data

    def send(self) -> None:
        assert self.device is not None
        self.host = torch.empty(self._size, dtype=self._dtype, pin_memory=True)
        host_copies.to_host_(self.host, self.device, "activations")

    def make_room(self, device: torch.device) -> None:
        self.device = torch.empty(self._size, dtype=self._dtype, device=device)

    def fetch(self) -> None:
        assert self.device is not None and self.host is not None
        host_copies.to_device_(self.device, self.host, "activations")


class _Block:
    """What one forward of one block keeps."""

    def __init__(self, stream: torch.Stream, previous: _Block | None, here: list[_Block]) -> None:
        self._stream, self._here = stream, here
        # A weak reference: a chain of blocks would keep the host memory of the whole microbatch.
        self._previous = None if previous is None else weakref.ref(previous)
        self._memories: dict[tuple[int, int, torch.dtype], _Memory] = {}  # by memory, version and format
        self._copied: torch.Event | None = None

    def put(self, tensor: Tensor) -> _View:
        """Keep a tensor, on the device until `leave`."""
        key = _memory(tensor), tensor._version, tensor.dtype
        if key not in self._memories:
            size = int(tensor.untyped_storage().nbytes()) // tensor.element_size()
            self._memories[key] = _Memory(self, tensor.detach().as_strided((size,), (1,), 0))
        memory = self._memories[key]
        memory.views += 1
        return _View(memory, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def send(self) -> None:
        self._in_stream(self._memories.values(), _Memory.send)

    def leave(self) -> None:
        """After the copies to or from the host, free the memory of the device."""
        self._here.remove(self)
        self._wait_for_copies()
        for memory in self._memories.values():
            memory.device = None

    def arrive(self, memory: _Memory) -> None:
        """Let the current stream wait until a memory is on the device. Where its block is not there, fetch what is
        still wanted of it, and begin to fetch the block before it, which backward comes to next."""
        if self not in self._here:
            self._come(keeping=None)
        if memory.device is None:
            self._fetch([memory])
        self._wait_for_copies()
        previous = None if self._previous is None else self._previous()
        if previous is not None and previous not in self._here:
            previous._come(keeping=self)

    def _come(self, keeping: _Block | None) -> None:
        """Begin to fetch what is still wanted; all blocks but `keeping` leave."""
        for block in [block for block in self._here if block is not keeping]:
            block.leave()
        self._here.append(self)
        self._fetch(memory for memory in self._memories.values() if memory.is_wanted)

    def _fetch(self, memories: Iterable[_Memory]) -> None:
        self._wait_for_copies()
        absent = [memory for memory in memories if memory.device is None]
        for memory in absent:
            memory.make_room(self._stream.device)
        if absent:
            self._in_stream(absent, _Memory.fetch)

    def _in_stream(self, memories: Iterable[_Memory], copy: Callable[[_Memory], None]) -> None:
        """Copy in the stream of copies what the current stream has made."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            for memory in memories:
                copy(memory)
        self._copied = torch.Event(self._stream.device)
        self._copied.record(self._stream)

    def _wait_for_copies(self) -> None:
        if self._copied is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self._copied)
            self._copied = None


class Offload:
    """Takes the activations of a rank's blocks to host memory."""

    def __init__(self, device: torch.device, streams: RandomStreams) -> None:
        assert device.type != "cpu", "activations are in host memory anyway"
        self._stream, self._streams = torch.Stream(device), streams
        self._here: list[_Block] = []  # whose memory may be on the device: at most two
        self._last: tuple[int, _Block] | None = None  # with its microbatch

    def begin(self, *, first: bool) -> _Block:
        """A block begins its forward: the memory of the one before the last is freed. `first`: of its stage."""
        for block in self._here[:-1]:
            block.leave()
        follows = self._last is not None and not first and self._last[0] == self._streams.microbatch
        previous = self._last[1] if follows and self._last is not None else None
        block = _Block(self._stream, previous, self._here)
        self._here.append(block)
        self._last = self._streams.microbatch, block
        return block
