"""Parts of the state between the memories of nodes. Each rank sends its part to a rank of the next node, while the next
step computes: a node that is lost takes nothing with it, unless the next one is lost as well. After a failure, nodes
bring each other the parts that they lack."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config import ParallelConfig
from megacore.files import replace_bytes
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import Group, Mesh, host_group
from megacore.survive.copies import make_room, record_of, write_manifest

_LARGEST = 1 << 28  # bytes of a message


def peer_of(rank: int, nodes: Sequence[int]) -> int:
    """The rank of the next node that gets this rank's part. `nodes`: the number of each rank's node."""
    neighbours = _members(nodes, (nodes[rank] + 1) % (max(nodes) + 1))
    return neighbours[nodes[:rank].count(nodes[rank]) % len(neighbours)]


class PeerCopies:
    """Sends this rank's part of each slot on, and puts what other ranks send into the same slot of this node.

    Args:
        host: all ranks, with messages between the memories of their hosts.
        nodes: the number of the node of each rank; there are several.
    """

    def __init__(self, host: Group, nodes: Sequence[int]) -> None:
        self._host, self._to = host, peer_of(host.rank, nodes)
        self._sources = [rank for rank in host.ranks if peer_of(rank, nodes) == host.rank]
        self.rooms: dict[Path, mmap.mmap] = {}  # of what they send
        self.step = 0  # bytes of a step, of all ranks
        self._threads = ThreadPoolExecutor(1)
        self._arrival: Future[None] | None = None

    def expected(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The files that others send into each slot, with their bytes; all ranks call this. `sizes`: of this rank's."""
        everyone = all_gather_objects(dict(sizes), self._host)
        self.step = sum(sum(one.values()) for one in everyone)
        return dict(chain.from_iterable(everyone[source].items() for source in self._sources))

    def start(self, slot: Path, record: bytes, files: Mapping[str, mmap.mmap]) -> None:
        """Begin to send a part, and to receive those of others. `slot`: its directory. `files`: as in the record; they
        do not change until `finish`."""
        for source in self._sources:
            (slot / record_of(source)).unlink(missing_ok=True)
        sent = [torch.tensor([len(record)]), *_messages(bytearray(record))]
        sent += [message for memory in files.values() for message in _messages(memory)]
        works, records = [dist.isend(message, self._to, group=self._host.handle) for message in sent], {}
        for source in self._sources:
            records[slot / record_of(source)] = text = _received(source, self._host)
            for name in json.loads(text)["files"]:
                parts = _messages(self.rooms[slot / name])
                works += [dist.irecv(message, source, group=self._host.handle) for message in parts]

        def arrive() -> None:
            for work in works:
                assert work is not None  # None is for who is not in the group
                work.wait()
            sent.clear()  # alive until here
            for path, text in records.items():
                replace_bytes(path, text, durable=False)  # only now the part counts

        self._arrival = self._threads.submit(arrive)

    def finish(self) -> None:
        """Wait until all that was started has arrived, on all ranks: until then they need the step before it."""
        if self._arrival is not None:
            self._arrival.result()
            barrier(self._host)


def complete(
    slot: Path, parts: Sequence[Sequence[int]], nodes: Sequence[int], mesh: Mesh, config: ParallelConfig
) -> None:
    """Make a slot a checkpoint on each node, which gets the parts that it lacks; all ranks call this. `slot`: its
    directory, the same on all nodes. `parts`: which each node has, by its number. `nodes`: the number of each rank's
    node. `config`: only its timeout is read."""
    if max(nodes):
        _bring(slot, parts, nodes, host_group(mesh, config))
    barrier(mesh.world)  # several ranks of a node receive
    if nodes.index(nodes[mesh.world.rank]) == mesh.world.rank:
        write_manifest(slot)
    barrier(mesh.world)


def _bring(slot: Path, parts: Sequence[Sequence[int]], nodes: Sequence[int], host: Group) -> None:
    for part in sorted(set().union(*parts)):
        source = next(node for node, own in enumerate(parts) if part in own)
        for node, own in enumerate(parts):
            if part in own:
                continue
            # The ranks of a node take turns, and all take them in the same order.
            sender, receiver = (ranks[part % len(ranks)] for ranks in (_members(nodes, source), _members(nodes, node)))
            if host.rank == sender:
                _send(slot, part, receiver, host)
            if host.rank == receiver:
                _receive(slot, part, sender, host)


def _send(slot: Path, part: int, to: int, host: Group) -> None:
    record = (slot / record_of(part)).read_bytes()
    files = [slot / name for name in json.loads(record)["files"]]
    dist.send(torch.tensor([len(record)]), to, group=host.handle)
    contents: Iterable[bytearray | mmap.mmap] = (bytearray(record), *map(_mapped, files))
    for content in contents:
        for message in _messages(content):
            dist.send(message, to, group=host.handle)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch reads only what can be written


def _receive(slot: Path, part: int, source: int, host: Group) -> None:
    record = _received(source, host)
    slot.mkdir(parents=True, exist_ok=True)
    for name, entry in json.loads(record)["files"].items():
        for message in _messages(make_room(slot / name, b"", entry["bytes"])):
            dist.recv(message, source, group=host.handle)
    replace_bytes(slot / record_of(part), record, durable=False)


def _received(source: int, host: Group) -> bytes:
    """A record: first its length comes, then its text."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=host.handle)
    text = bytearray(int(size))
    for message in _messages(text):
        dist.recv(message, source, group=host.handle)
    return bytes(text)


def _messages(content: bytearray | mmap.mmap) -> Sequence[Tensor]:
    return torch.frombuffer(content, dtype=torch.uint8).split(_LARGEST)


def _members(nodes: Sequence[int], node: int) -> list[int]:
    """The ranks of a node."""
    return [rank for rank, where in enumerate(nodes) if where == node]
