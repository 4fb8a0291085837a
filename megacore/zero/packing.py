"""Matrices that no shard may split: which shard takes which, and where buckets of them end.

Shards of a bucket have one size, that of the fullest: what the others lack is padding. To make the fullest small is
multiprocessor scheduling, for which two heuristics are known to be good: the largest first, each to the emptiest shard
(Graham 1969), and to fill shards of a size that bisection finds (MULTIFIT: Coffman, Garey and Johnson 1978). Here a
shard is filled with the best of its subsets, as a model has few sizes of matrices. How well a bucket can be packed
depends most on what is in it: so buckets end where it packs well. Arithmetic with integers: all ranks find the same.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

# Most padding of a bucket, in percent of it, where its matrices allow that.
_PERCENT = 1
# Most subsets of sizes that are tried for a shard.
_SUBSETS = 200
# In units of which all sizes are multiples: the largest shard whose best subset is found before.
_SUMS = 1 << 14
# Least bytes of a rank's share of a bucket, or this part of the bucket where that is less: what each rank
# sends to each other is a share, and small messages do not use the network (Megatron-LM's buckets grow likewise).
_SHARE_BYTES = 1 << 20
_SMALLEST_SHARE = 16

Counts = tuple[tuple[int, int], ...]
"""How many matrices there are of each size, the largest first."""


@dataclass(frozen=True)
class Packing:
    """Matrices in shards."""

    shard_size: int  # elements of a shard
    shard_of: list[int]  # the number of each matrix's shard


def grown(bucket_bytes: int, ranks: int) -> int:
    """The size of a bucket for so many ranks: it grows once a rank's share were below 1 MiB or 1/16 of the bucket."""
    return max(bucket_bytes, ranks * min(_SHARE_BYTES, bucket_bytes // _SMALLEST_SHARE))


def pack(sizes: Sequence[int], shards: int, *, taken: int = 0, unit: int = 1) -> Packing:
    """Matrices in shards, one after the other, such that the shards are small. `sizes`: elements of each matrix,
    multiples of `unit`, as a shard's size is. `taken`: elements at the beginning that others have, likewise."""
    step = math.gcd(*sizes) if sizes and not taken else unit
    total = taken + sum(sizes)
    low = _round_up(max(least_shard(_counts(sizes), shards), -(-total // shards)), step)
    high = max(low, _round_up(total, step))
    found = _largest_to_emptiest(sizes, _rooms(high, shards, taken))
    assert found is not None, "all of it fits into one shard"
    if not taken:
        high = max(low, *(sum(held) for held in _by_shard(sizes, found, shards)))
    for fill in (_largest_to_emptiest, _mixed, _largest_first) if taken else (_mixed, _largest_first):
        first = low
        while first < high:
            middle = (first + high) // 2 // step * step
            if (shard_of := fill(sizes, _rooms(middle, shards, taken))) is None:
                first = middle + step
            else:
                high, found = middle, shard_of
    return Packing(high, found)


def exchange(shard_of: Sequence[int], works: Sequence[float], busy: Sequence[float], *, fixed: int) -> list[int]:
    """The shards of matrices once whole shards have changed places, so that ranks have similar work: the shard with
    most work goes to the rank that is least busy. `shard_of`: the number of each matrix's shard. `busy`: of each rank,
    with other buckets. `fixed`: so many shards, the first ones, stay where they are."""
    work = [0.0] * len(busy)
    for shard, of_matrix in zip(shard_of, works, strict=True):
        work[shard] += of_matrix
    others = range(fixed, len(busy))
    by_work = sorted(others, key=lambda shard: -work[shard])
    place = dict(zip(by_work, sorted(others, key=lambda rank: busy[rank]), strict=True))
    return [place.get(shard, shard) for shard in shard_of]


def least_shard(counts: Counts, shards: int) -> int:
    """A size that no packing is below: of the mean, the largest matrix, and for any k the k + 1 smallest of the k x
    shards + 1 largest, as some shard has as many of these."""
    total, number = sum(size * count for size, count in counts), sum(count for _, count in counts)
    least = max(-(-total // shards), counts[0][0] if counts else 0)
    for k in range(1, -(-number // shards)):
        least = max(least, _sum_of_last(counts, k * shards + 1, k + 1))
    return least


def bucket_ends(sizes: Sequence[int], shards: int, *, least: int, joined: Collection[int] = ()) -> list[int]:
    """Where buckets of consecutive matrices end, so that each has at most 1% of padding, or else as little as possible;
    then, so that they are many and of similar size: reductions begin early, and few wait for the last. Returns for each
    bucket one past its last matrix.

    Args:
        sizes: elements of each matrix, in the order in which backward computes their gradients.
        shards: number of shards of a bucket.
        least: elements of a bucket, unless all have fewer.
        joined: numbers of matrices after which no bucket ends.
    """
    kinds = sorted(set(sizes), reverse=True)
    before = [(0,) * len(kinds)]  # of each size, how many matrices are before each position
    for size in sizes:
        before.append(tuple(count + (kind == size) for count, kind in zip(before[-1], kinds, strict=True)))
    ends = [end for end in range(1, len(sizes) + 1) if end - 1 not in joined or end == len(sizes)]
    sums = [0, *accumulate(sizes)]
    whole = _excess(_between(kinds, before[0], before[-1]), shards), sums[-1] ** 2
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}  # excess, sum of squares, where the last bucket begins
    for end in ends:
        bounds = []  # of what each beginning of the last bucket makes possible
        for first, (excess, squares, _) in best.items():
            total = sums[end] - sums[first]
            bound = excess, squares + total * total, first
            if bound[:2] <= whole and (total >= least or end - first == len(sizes)):
                bounds.append(bound)
        heapq.heapify(bounds)
        found: tuple[int, int, int] | None = None
        while bounds and (found is None or bounds[0] < found):
            excess, squares, first = heapq.heappop(bounds)
            members = _between(kinds, before[first], before[end])
            # All in one bucket is always possible: `pack` may have found how where `_fits` has not.
            if whole[0] == 0 and end - first < len(sizes) and not _fits(members, shards):
                continue
            if whole[0]:
                excess += _excess(members, shards)
            candidate = excess, squares, first
            found = candidate if found is None else min(found, candidate)
        if found is not None and found[:2] <= whole:
            best[end] = found
    chosen = [len(sizes)] if sizes else []
    while chosen and (first := best[chosen[-1]][2]):
        chosen.append(first)
    return chosen[::-1]


def _between(kinds: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Counts:
    return tuple((size, m - n) for size, n, m in zip(kinds, before, after, strict=True) if m > n)


@lru_cache(maxsize=1 << 16)
def _fits(counts: Counts, shards: int) -> bool:
    room = _largest_sum(counts, _allowed(counts, shards))
    return least_shard(counts, shards) <= room and any(
        _fillings(counts, [room] * shards, mixed=mixed) is not None for mixed in (True, False)
    )


@lru_cache(maxsize=1 << 16)
def _excess(counts: Counts, shards: int) -> int:
    """Elements of padding beyond what is allowed."""
    if (least := least_shard(counts, shards)) > _allowed(counts, shards):
        return (least - _allowed(counts, shards)) * shards
    if _fits(counts, shards):
        return 0
    shard_size = pack([size for size, count in counts for _ in range(count)], shards).shard_size
    return max(shard_size - _allowed(counts, shards), 0) * shards


def _allowed(counts: Counts, shards: int) -> int:
    """The largest shard with the padding that is allowed."""
    return sum(size * count for size, count in counts) * 100 // (100 - _PERCENT) // shards


def _counts(sizes: Sequence[int]) -> Counts:
    return tuple(sorted(Counter(sizes).items(), reverse=True))


def _sum_of_last(counts: Counts, first: int, last: int) -> int:
    """The sum of the `last` smallest of the `first` largest."""
    total = 0
    for size, count in counts:
        here = min(count, first)
        first -= here
        total += size * max(0, min(here, last - first))
    return total


def _rooms(shard_size: int, shards: int, taken: int) -> list[int]:
    """What is left in each shard behind elements that others have."""
    return [min(max((shard + 1) * shard_size - taken, 0), shard_size) for shard in range(shards)]


def _by_shard(sizes: Sequence[int], shard_of: Sequence[int], shards: int) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(shards)]
    for size, shard in zip(sizes, shard_of, strict=True):
        held[shard].append(size)
    return held


def _largest_to_emptiest(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The shard of each matrix, the largest first, each in the shard with most room; None if one does not fit."""
    heap = sorted((-room, shard) for shard, room in enumerate(rooms))
    shard_of = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        room, shard_of[number] = heap[0]
        if -room < sizes[number]:
            return None
        heapq.heapreplace(heap, (room + sizes[number], shard_of[number]))
    return shard_of


def _mixed(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The shard of each matrix where shard after shard gets what fills it best; None if some are left."""
    return _filled(sizes, rooms, mixed=True)


def _largest_first(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The same with as many of the largest as possible."""
    return _filled(sizes, rooms, mixed=False)


def _filled(sizes: Sequence[int], rooms: Sequence[int], *, mixed: bool) -> list[int] | None:
    if (fillings := _fillings(_counts(sizes), rooms, mixed=mixed)) is None:
        return None
    numbers: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        numbers.setdefault(size, []).append(number)
    shard_of = [0] * len(sizes)
    for shard, filling in enumerate(fillings):
        for size, count in filling.items():
            for _ in range(count):
                shard_of[numbers[size].pop()] = shard
    return shard_of


def _fillings(counts: Counts, rooms: Sequence[int], *, mixed: bool) -> list[dict[int, int]] | None:
    """What each shard gets, as numbers of matrices by size, if shard after shard, those with most room first, takes
    what fills it best; None if some are left. Of what fills it alike it takes what is most like the rest, or, unless
    `mixed`, most of the largest."""
    left, total, free = dict(counts), sum(size * count for size, count in counts), sum(rooms)
    fillings: list[dict[int, int]] = [{} for _ in rooms]
    room, filling = -1, dict[int, int]()
    order = sorted(range(len(rooms)), key=lambda shard: -rooms[shard])
    for done, shard in enumerate(order):
        if total == 0 or total > free:
            break
        # What was best for one shard is best for the next, as long as there is enough of it.
        if rooms[shard] != room or any(left[size] < count for size, count in filling.items()):
            room = rooms[shard]
            some = tuple((size, count) for size, count in left.items() if count)
            filling = _best_subset(some, room, len(rooms) - done if mixed else 0)
        for size, count in filling.items():
            left[size] -= count
            total -= size * count
        fillings[shard] = filling
        free -= room
    return None if total else fillings


def _best_subset(counts: Counts, room: int, among: int) -> dict[int, int]:
    """Numbers of matrices by size that fill a shard best, of those that are tried. `counts`: how many there are of each
    size, the largest first. `among`: try numbers near the mean over as many shards first; 0: large ones first."""
    rest = [0, *accumulate(size * count for size, count in reversed(counts))][::-1]  # elements from each size on
    goal, last = _largest_sum(counts, room), len(counts) - 1
    best, best_used, tried = list[int](), -1, 0
    chosen = [0] * len(counts)

    def extend(number: int, used: int) -> None:
        nonlocal best, best_used, tried
        size, count = counts[number]
        most, bound = min(count, (room - used) // size), min(goal, used + rest[number])
        for taken in _from(min(count // among, most), most) if among else range(most, -1, -1):
            if tried > _SUBSETS or bound <= best_used:
                return
            tried, held, chosen[number] = tried + 1, used + taken * size, taken
            if held > best_used:
                best, best_used = chosen[: number + 1], held
            if number < last and best_used < goal and held + rest[number + 1] > best_used:
                extend(number + 1, held)

    tried, best_used = 1, 0
    extend(0, 0)
    return {size: count for (size, _), count in zip(counts, best, strict=False) if count}


def _largest_sum(counts: Counts, room: int) -> int:
    """Most elements of a shard that any subset fills, or, where sizes have no large common divisor, a bound of it."""
    unit = math.gcd(*(size for size, _ in counts)) or 1
    if (room := room // unit) > _SUMS:
        return room * unit
    sums, mask = 1, (1 << room + 1) - 1  # bit n: a subset has n units
    for size, count in counts:
        step, part = size // unit, 1
        while count:
            taken = min(part, count)
            sums |= sums << step * taken & mask
            count, part = count - taken, 2 * part
    return (sums.bit_length() - 1) * unit


@lru_cache(maxsize=1 << 12)
def _from(middle: int, last: int) -> tuple[int, ...]:
    """0 to `last`, those near the middle first."""
    return tuple(sorted(range(last + 1), key=lambda number: (abs(number - middle), -number)))


def _round_up(elements: int, unit: int) -> int:
    return -(-elements // unit) * unit
