"""Where parameters lie in a flat buffer, and which part of it a rank updates: arithmetic only.

A bucket is a run of parameters laid one after the other, each from an aligned offset, and padded so that it divides
into equal shards. A shard cuts parameters anywhere, except those that the optimizer takes whole; a `Segment` is the
part of one parameter inside a shard, by the name and the offset in the parameter, which makes sharded state independent
of the sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megacore.parallel.mesh import ReplicaRole
from megacore.parallel.sharding import ShardedParameter

# Elements at multiples of which parameters and shards begin: 64 bytes at 16 bits, 128 at 32. What a matrix product
# rounds may depend on how its operands are aligned, and unaligned ones are slower.
ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of one parameter's elements inside a shard.

    Attributes:
        name: the parameter's global name.
        start: first element of the local parameter, flattened.
        stop: one past the last.
        offset: where the run begins in the shard.
    """

    name: str
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        """The run's elements of the shard."""
        return slice(self.offset, self.offset + self.stop - self.start)


class FlatLayout:
    """Parameters laid one after the other.

    Args:
        parameters: in order.
        shards: number of equal shards.
        whole: names of parameters that no shard may cut. They come after the others, and are dealt out to the shards
            so that the largest shard is small.

    Attributes:
        offsets: name -> where the parameter begins; in ascending order.
        shard_size: elements of a shard, padding included.
        padding: elements of all shards that belong to no parameter.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], shards: int, whole: Collection[str] = frozenset()
    ) -> None:
        self._sizes = {parameter.spec.name: parameter.numel() for parameter in parameters}
        uncut = {n: _aligned(size) for n, size in self._sizes.items() if n in whole} if shards > 1 else {}
        self.offsets: dict[str, int] = {}
        used = 0
        for name, size in self._sizes.items():
            if name not in uncut:
                self.offsets[name] = used
                used += _aligned(size)
        self.shard_size = _smallest_shard(used, uncut, shards)
        self.offsets |= _dealt_out(used, uncut, shards, self.shard_size) or {}
        self.offsets = dict(sorted(self.offsets.items(), key=lambda item: item[1]))
        self.size = self.shard_size * shards
        self.padding = self.size - sum(self._sizes.values())

    def place(self, name: str) -> slice:
        """The parameter's elements of the flat buffer."""
        return slice(self.offsets[name], self.offsets[name] + self._sizes[name])

    def segments(self, shard: int) -> list[Segment]:
        """What shard number `shard` holds, in order."""
        begin, end = shard * self.shard_size, (shard + 1) * self.shard_size
        segments = []
        for name, offset in self.offsets.items():
            first, last = max(begin, offset), min(end, offset + self._sizes[name])
            if first < last:
                segments.append(Segment(name=name, start=first - offset, stop=last - offset, offset=first - begin))
        return segments


def _smallest_shard(used: int, uncut: Mapping[str, int], shards: int) -> int:
    """The smallest size of a shard, of those that bisection tries, into which everything goes.

    Args:
        used: elements before the uncut parameters.
        uncut: name -> elements, aligned.
        shards: number of shards.
    """
    total = used + sum(uncut.values())
    low = max(_aligned(-(-total // shards)), max(uncut.values(), default=0))
    high = max(low, _aligned(total))
    while low < high:
        middle = (low + high) // 2 // ALIGNMENT * ALIGNMENT
        if _dealt_out(used, uncut, shards, middle) is None:
            low = middle + ALIGNMENT
        else:
            high = middle
    return high


def _dealt_out(used: int, uncut: Mapping[str, int], shards: int, shard_size: int) -> dict[str, int] | None:
    """Where uncut parameters begin, the largest first, each in the shard with most room; None if one does not fit."""
    ends = [min(max(shard * shard_size, used), (shard + 1) * shard_size) for shard in range(shards)]
    offsets: dict[str, int] = {}
    for name, size in sorted(uncut.items(), key=lambda item: -item[1]):
        room = [(shard + 1) * shard_size - end for shard, end in enumerate(ends)]
        shard = room.index(max(room))
        if room[shard] < size:
            return None
        offsets[name] = ends[shard]
        ends[shard] += size
    return offsets


def runs(segments: Iterable[Segment]) -> list[slice]:
    """The segments' elements of their shard, in order; those that only padding separates as one slice."""
    joined: list[slice] = []
    for place in (segment.place for segment in segments):
        if joined and _aligned(joined[-1].stop) == place.start:
            place = slice(joined.pop().start, place.stop)
        joined.append(place)
    return joined


BucketKey = tuple[ReplicaRole, torch.dtype]


def bucket_key(parameter: ShardedParameter) -> BucketKey:
    """What parameters of one bucket have in common: the ranks that sum their gradients, and the dtype."""
    return parameter.spec.replica_role, parameter.dtype


def assign_buckets(
    parameters: Sequence[ShardedParameter],
    bucket_bytes: Mapping[ReplicaRole, int],
    separate: frozenset[str] = frozenset(),
) -> list[list[ShardedParameter]]:
    """Group parameters of one `bucket_key`, last first, into buckets (the final ones may be smaller).

    Args:
        parameters: in the order in which layers use them.
        bucket_bytes: a bucket is closed once it holds this many bytes or more; by the role of its replica group.
        separate: global names of parameters of which each gets a bucket for itself.

    Returns:
        The buckets, the last used first.
    """
    buckets: list[list[ShardedParameter]] = []
    unfinished: dict[BucketKey, list[ShardedParameter]] = {}
    sizes: Counter[BucketKey] = Counter()  # bytes of the unfinished buckets
    for parameter in reversed(parameters):
        if parameter.spec.name in separate:
            buckets.append([parameter])
            continue
        key = bucket_key(parameter)
        unfinished.setdefault(key, []).append(parameter)
        sizes[key] += parameter.numel() * parameter.element_size()
        if sizes[key] >= bucket_bytes[key[0]]:
            buckets.append(unfinished.pop(key))
            del sizes[key]
    return [*buckets, *unfinished.values()]


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
