"""The offsets of parameters in a flat buffer, and the part of the buffer that a rank updates: arithmetic only.

A bucket holds parameters one after the other, each at an aligned offset, and is padded so that it divides into equal
shards. A shard boundary may split any parameter except those that the optimizer needs whole. A `Segment` is the part
of one parameter inside a shard. It is addressed by the parameter's name and an offset in the parameter, which makes
sharded state independent of the sharding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import torch

from megacore.parallel.mesh import ReplicaRole
from megacore.parallel.sharding import ShardedParameter
from megacore.zero.packing import bucket_ends, exchange, pack

# Parameters and shards begin at multiples of this many elements: 64 bytes at 16 bits, 128 at 32. What a matrix product
# rounds may depend on how its operands are aligned, and unaligned ones are slower.
ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive elements of one parameter inside a shard."""

    name: str  # the parameter's global name
    start: int  # first element of the local parameter, flattened
    stop: int  # one past the last
    offset: int  # of the first element in the shard

    @cached_property
    def shard_slice(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class FlatLayout:
    """Parameters one after the other in a flat buffer. `whole`: the work of updating each of the parameters that no
    shard may split, by name. They follow the others, and are distributed over the shards so that the largest shard is
    small. `unit`: parameters and shards begin at multiples of this many elements too, such as the blocks of a
    quantizer. `busy`: the work of each rank in other buckets; none: 0."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        shards: int,
        whole: Mapping[str, float] = MappingProxyType({}),
        *,
        unit: int = 1,
        busy: Sequence[float] = (),
    ) -> None:
        unit = math.lcm(unit, ALIGNMENT)
        self._sizes = {parameter.spec.name: parameter.numel() for parameter in parameters}
        unsplit = {n: round_up(size, unit) for n, size in self._sizes.items() if n in whole} if shards > 1 else {}
        self.offsets: dict[str, int] = {}  # name -> offset of the parameter, in ascending order
        used = 0
        for name, size in self._sizes.items():
            if name not in unsplit:
                self.offsets[name] = used
                used += round_up(size, unit)
        packing = pack(list(unsplit.values()), shards, taken=used, unit=unit)
        self.shard_size = packing.shard_size  # elements of a shard, padding included
        self.busy = list(busy) or [0.0] * shards  # the work of each rank, this bucket's included
        works = [whole[name] for name in unsplit]
        fixed = -(-used // max(self.shard_size, 1))
        ends = [max(shard * self.shard_size, used) for shard in range(shards)]
        for name, shard in zip(unsplit, exchange(packing.shard_of, works, self.busy, fixed=fixed), strict=True):
            self.offsets[name] = ends[shard]
            ends[shard] += unsplit[name]
            self.busy[shard] += whole[name]
        self.offsets = dict(sorted(self.offsets.items(), key=lambda item: item[1]))
        self.size = self.shard_size * shards
        self.padding = self.size - sum(self._sizes.values())  # elements of all shards that belong to no parameter

    def slice_of(self, name: str) -> slice:
        return slice(self.offsets[name], self.offsets[name] + self._sizes[name])

    def segments(self, shard: int) -> list[Segment]:
        begin, end = shard * self.shard_size, (shard + 1) * self.shard_size
        segments = []
        for name, offset in self.offsets.items():
            first, last = max(begin, offset), min(end, offset + self._sizes[name])
            if first < last:
                segments.append(Segment(name=name, start=first - offset, stop=last - offset, offset=first - begin))
        return segments


def contiguous_slices(segments: Iterable[Segment]) -> list[slice]:
    """The segments' slices of their shard, in order; those that only padding separates become one slice."""
    joined: list[slice] = []
    for elements in (segment.shard_slice for segment in segments):
        if joined and round_up(joined[-1].stop) == elements.start:
            elements = slice(joined.pop().start, elements.stop)
        joined.append(elements)
    return joined


BucketKey = tuple[ReplicaRole, torch.dtype]


def bucket_key(parameter: ShardedParameter) -> BucketKey:
    """What all parameters of a bucket share: the role of their replica group, and the dtype."""
    return parameter.spec.replica_role, parameter.dtype


def assign_buckets(
    parameters: Sequence[ShardedParameter],
    bucket_bytes: Mapping[ReplicaRole, int],
    separate: frozenset[str] = frozenset(),
    *,
    least: Mapping[ReplicaRole, int] = MappingProxyType({}),
) -> list[list[ShardedParameter]]:
    """Group parameters of one `bucket_key`, last first, into buckets (the final ones may be smaller). Returns the
    buckets, the last used first.

    Args:
        parameters: in the order in which layers use them.
        bucket_bytes: a bucket is closed once it holds this many bytes or more, unless the parameter before stays
            with this one; by the role of its replica group.
        separate: global names of parameters that each get a separate bucket.
        least: a final bucket of fewer bytes joins the one before of its key; by the role of its replica group.
    """
    buckets: list[list[ShardedParameter]] = []
    closed: dict[BucketKey, list[ShardedParameter]] = {}  # the latest of each key
    unfinished: dict[BucketKey, list[ShardedParameter]] = {}
    sizes: Counter[BucketKey] = Counter()  # bytes of the unfinished buckets
    for number in reversed(range(len(parameters))):
        parameter, joins = parameters[number], number > 0 and parameters[number - 1].adjacent_to_next
        if parameter.spec.name in separate:
            buckets.append([parameter])
            continue
        key = bucket_key(parameter)
        unfinished.setdefault(key, []).append(parameter)
        sizes[key] += parameter.numel() * parameter.element_size()
        if sizes[key] >= bucket_bytes[key[0]] and not joins:
            closed[key] = unfinished.pop(key)
            buckets.append(closed[key])
            del sizes[key]
    for key, final in unfinished.items():
        if key in closed and sizes[key] < least.get(key[0], 0):
            closed[key] += final
        else:
            buckets.append(final)
    return buckets


def assign_whole(
    parameters: Sequence[ShardedParameter],
    shards: Mapping[ReplicaRole, int],
    least: Mapping[ReplicaRole, int],
    *,
    unit: int = 1,
) -> list[list[ShardedParameter]]:
    """Group parameters that no shard may split, of one `bucket_key`, last first, into buckets with little padding.
    Returns the buckets.

    Args:
        parameters: in the order in which layers use them.
        shards: number of shards, by the role of the replica group.
        least: bytes that a bucket has unless all have fewer, by the role of the replica group.
        unit: parameters begin at multiples of this many elements too.
    """
    unit = math.lcm(unit, ALIGNMENT)
    by_key: dict[BucketKey, list[ShardedParameter]] = {}
    for parameter in reversed(parameters):
        by_key.setdefault(bucket_key(parameter), []).append(parameter)
    buckets = []
    for (role, dtype), members in by_key.items():
        ends = bucket_ends(
            [round_up(parameter.numel(), unit) for parameter in members],
            shards[role],
            least=least[role] // dtype.itemsize,
            joined={number - 1 for number, parameter in enumerate(members) if parameter.adjacent_to_next},
        )
        buckets += [members[first:end] for first, end in pairwise([0, *ends])]
    return buckets


def round_up(elements: int, unit: int = ALIGNMENT) -> int:
    """To a multiple of `unit`."""
    return -(-elements // unit) * unit
