"""Collectives from messages between two ranks, each by the algorithm that MPI libraries and NCCL use.

| function | algorithm | rounds of n ranks |
|---|---|---|
| broadcast, reduce | binomial tree: in every round twice as many ranks hold the data | log2 n |
| scatter, gather | the same tree, but a message holds only the parts that its receiver's subtree needs | log2 n |
| all_gather, reduce_scatter | ring: every rank passes a part on to its neighbour | n - 1 |
| all_reduce_ring | ring reduce-scatter, then ring all-gather (Patarasuk and Yuan 2009) | 2 (n - 1) |
| all_reduce_tree | reduce, then broadcast | 2 log2 n |
| all_reduce_halving | reduce-scatter by halving, all-gather by doubling (Rabenseifner 2004) | 2 log2 n |
| all_to_all | in round k every rank sends to the rank k places after it | n - 1 |

Shape legend: n ranks, k elements of one part. Every rank calls the function; sums are in the order of the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wire import Wire


def broadcast(wire: Wire, x: Tensor, root: int = 0) -> Tensor:
    """Overwrite every rank's x with the root's."""
    relative = (wire.rank - root) % wire.size  # the root is 0
    for reach in _powers_below(wire.size):
        if relative < reach:
            child = relative + reach
            wire.round(send=x if child < wire.size else None, to=_absolute(child, root, wire), content="x")
        elif relative < 2 * reach:
            wire.round(receive=x, source=_absolute(relative - reach, root, wire))
        else:
            wire.round()
    return x


def reduce(wire: Wire, x: Tensor, root: int = 0) -> Tensor:
    """The sum of all ranks' x on the root, and partial sums elsewhere: a broadcast that runs backwards."""
    relative = (wire.rank - root) % wire.size
    total, received = x.clone(), torch.empty_like(x)
    for reach in reversed(list(_powers_below(wire.size))):
        child = relative + reach
        if relative < reach and child < wire.size:
            wire.round(receive=received, source=_absolute(child, root, wire))
            total += received
        elif reach <= relative < 2 * reach:
            wire.round(send=total, to=_absolute(relative - reach, root, wire), content="partial sum")
        else:
            wire.round()
    return total


def scatter(wire: Wire, parts: Tensor, root: int = 0) -> Tensor:
    """Give part i of the root to rank i.

    Args:
        wire: between the ranks.
        parts: [n, k]; only the root's is read.
        root: the rank that has all parts.

    Returns:
        [k]
    """
    relative = (wire.rank - root) % wire.size
    held = parts.roll(-root, 0) if relative == 0 else torch.empty_like(parts)  # row i is for relative rank i
    for half in reversed(list(_powers_below(wire.size))):
        if relative % (2 * half) == 0:
            child = relative + half
            theirs = held[child : child + half]
            wire.round(send=theirs, to=_absolute(child, root, wire), content=_rows(child, theirs, root, wire))
        elif relative % half == 0:
            wire.round(receive=held[relative : relative + half], source=_absolute(relative - half, root, wire))
        else:
            wire.round()
    return held[relative].clone()


def gather(wire: Wire, part: Tensor, root: int = 0) -> Tensor:
    """Collect every rank's part on the root: a scatter that runs backwards.

    Args:
        wire: between the ranks.
        part: [k]
        root: the rank that gets all parts.

    Returns:
        [n, k]; on other ranks than the root most rows have no meaning.
    """
    relative = (wire.rank - root) % wire.size
    held = part.new_empty(wire.size, *part.shape)
    held[relative] = part
    for half in _powers_below(wire.size):
        if relative % (2 * half) == 0:
            child = relative + half
            wire.round(receive=held[child : child + half], source=_absolute(child, root, wire))
        elif relative % half == 0:
            ours = held[relative : relative + half]
            content = _rows(relative, ours, root, wire)
            wire.round(send=ours, to=_absolute(relative - half, root, wire), content=content)
        else:
            wire.round()
    return held.roll(root, 0)


def all_gather(wire: Wire, part: Tensor) -> Tensor:
    """Every rank's part on every rank, over a ring: [k] -> [n, k]"""
    n, after, before = wire.size, (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    whole = part.new_empty(n, *part.shape)
    whole[wire.rank] = part
    for step in range(n - 1):
        sent, received = (wire.rank - step) % n, (wire.rank - step - 1) % n
        wire.round(send=whole[sent], to=after, content=f"part {sent}", receive=whole[received], source=before)
    return whole


def reduce_scatter(wire: Wire, parts: Tensor) -> Tensor:
    """The sum of all ranks' part r on rank r, over a ring: [n, k] -> [k]

    Each part travels once round the ring, and every rank on its way adds its own numbers.
    """
    n, after, before = wire.size, (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    sums, received = parts.clone(), torch.empty_like(parts[0])
    for step in range(n - 1):
        sent, grows = (wire.rank - step - 1) % n, (wire.rank - step - 2) % n
        wire.round(send=sums[sent], to=after, content=f"sum {sent}", receive=received, source=before)
        sums[grows] += received
    return sums[wire.rank].clone()


def all_reduce_ring(wire: Wire, x: Tensor) -> Tensor:
    """The sum on every rank, with the fewest bytes; x has n k elements."""
    parts = x.reshape(wire.size, -1)
    return all_gather(wire, reduce_scatter(wire, parts)).view_as(x)


def all_reduce_tree(wire: Wire, x: Tensor) -> Tensor:
    """The sum on every rank, in few rounds, each with all the bytes: for small tensors."""
    return broadcast(wire, reduce(wire, x))


def all_reduce_halving(wire: Wire, x: Tensor) -> Tensor:
    """The sum on every rank, with the bytes of the ring and the rounds of the tree; x has n k elements.

    Raises:
        ValueError: the number of ranks is not a power of two.
    """
    n = wire.size
    if n & (n - 1):
        raise ValueError(f"halving pairs the ranks in every round: {n} ranks are not a power of two")
    sums = x.reshape(n, -1).clone()
    received = torch.empty_like(sums)
    for half in reversed(list(_powers_below(n))):
        peer = wire.rank ^ half
        ours, theirs = _block(wire.rank, half), _block(peer, half)
        content = f"sums {_span(theirs)}"
        wire.round(send=sums[theirs], to=peer, content=content, receive=received[ours], source=peer)
        sums[ours] += received[ours]
    for half in _powers_below(n):
        peer = wire.rank ^ half
        ours, theirs = _block(wire.rank, half), _block(peer, half)
        wire.round(send=sums[ours], to=peer, content=f"parts {_span(ours)}", receive=sums[theirs], source=peer)
    return sums.view_as(x)


def all_to_all(wire: Wire, parts: Tensor) -> Tensor:
    """Give part i to rank i, and collect what every rank has for this one: [n, k] -> [n, k]"""
    n, received = wire.size, parts.clone()
    for distance in range(1, n):
        to, source = (wire.rank + distance) % n, (wire.rank - distance) % n
        wire.round(send=parts[to], to=to, content=f"{wire.rank} for {to}", receive=received[source], source=source)
    return received


def _powers_below(n: int) -> Iterator[int]:
    """1, 2, 4, ... below n"""
    power = 1
    while power < n:
        yield power
        power *= 2


def _absolute(relative: int, root: int, wire: Wire) -> int:
    return (relative + root) % wire.size


def _block(rank: int, size: int) -> slice:
    """The aligned block of `size` parts that holds a rank's."""
    start = rank // size * size
    return slice(start, start + size)


def _span(block: slice) -> str:
    return f"{block.start}" if block.stop - block.start == 1 else f"{block.start}-{block.stop - 1}"


def _rows(first: int, rows: Tensor, root: int, wire: Wire) -> str:
    numbers = [_absolute(first + i, root, wire) for i in range(len(rows))]
    return "part " + ",".join(map(str, numbers))
