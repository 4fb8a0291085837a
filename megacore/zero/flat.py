"""Where parameters lie in a flat buffer, and which part of it a rank updates: arithmetic only.

A bucket is a run of parameters laid one after the other, each from an aligned offset, and padded so that it divides
into equal shards. A shard cuts parameters anywhere; a `Segment` is the part of one parameter inside a shard, by the
name and the offset in the parameter, which makes sharded state independent of the sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

    Attributes:
        offsets: name -> where the parameter begins.
        shard_size: elements of a shard, padding included.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], shards: int) -> None:
        self.offsets: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        used = 0
        for parameter in parameters:
            name = parameter.spec.name
            self.offsets[name], self._sizes[name] = used, parameter.numel()
            used += _aligned(parameter.numel())
        self.shard_size = _aligned(-(-used // shards))
        self.size = self.shard_size * shards

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
