"""Collectives made of point-to-point messages: reduce-scatter, all-gather, sums of a few numbers and a gathering of
objects for CPUs, and sums over a part of a group.

gloo's reduce-scatter and all-gather copy the whole buffer first, once for the former and again for the latter, and
take about twice as long as these (28 MiB, 2 and 4 ranks, torch 2.13). Every rank exchanges one message with every
other: each byte travels once. Terms are added in the order of the ranks, so that the sum has the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import Group

_PART = 1 << 24  # elements of a sum that are on their way at a time: each takes a buffer for every other member


def start_reduce_scatter(shard: Tensor, whole: Tensor, group: Group) -> tuple[list[dist.Work], Callable[[], None]]:
    """Begin to sum the flat `whole` over the group into `shard`, this rank's part; `shard` may lie in `whole`, as this
    rank's part of it. Returns what to wait for, and what to do then."""
    parts = list(whole.chunk(group.size))
    terms = [part if rank == group.rank else shard.new_empty(shard.shape) for rank, part in enumerate(parts)]
    works = exchange(parts, terms, group)
    in_place = parts[group.rank].data_ptr() == shard.data_ptr()

    def add() -> None:
        total = terms[0]
        for rank, term in enumerate(terms[1:], start=1):
            # In place, this rank's term lies where the sum is to be: until it is added, the sum is in the first term.
            total = torch.add(total, term, out=total if in_place and rank < group.rank else shard)

    return works, add


def start_all_gather(whole: Tensor, shard: Tensor, group: Group) -> tuple[list[dist.Work], Callable[[], None]]:
    """Begin to fill the flat `whole`, of which `shard` may be a part. Returns what to wait for, and what to do then."""
    parts = list(whole.chunk(group.size))
    works = exchange([shard] * group.size, parts, group)

    def copy() -> None:
        if parts[group.rank].data_ptr() != shard.data_ptr():
            parts[group.rank].copy_(shard)

    return works, copy


def start_sum(tensor: Tensor, group: Group) -> tuple[list[dist.Work], Callable[[], None]]:
    """Begin to sum a few numbers in place. Every rank sends its own to every other one: one step, where gloo's ring
    takes 2 (n - 1) and wakes a thread in each. Returns what to wait for, and what to do then."""
    mine = tensor.clone()
    terms = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    works = exchange([mine] * group.size, terms, group)

    def add() -> None:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        tensor.copy_(total)

    return works, add


def start_all_to_all(incoming: Tensor, outgoing: Tensor, group: Group) -> tuple[list[dist.Work], Callable[[], None]]:
    """Begin to send each rank its part of `outgoing`, along the first dimension, and to receive from each into
    `incoming`. Returns what to wait for, and what to do then."""
    works = exchange(list(outgoing), list(incoming), group)

    def copy() -> None:
        incoming[group.rank].copy_(outgoing[group.rank])

    return works, copy


def exchange(outgoing: list[Tensor], incoming: list[Tensor], group: Group) -> list[dist.Work]:
    """Begin to send to every other rank and to receive from it; the nearest in group order first."""
    works: list[dist.Work | None] = []
    for distance in range(1, group.size):
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        works.append(dist.irecv(incoming[source], group.ranks[source], group=group.handle))
        works.append(dist.isend(outgoing[to], group.ranks[to], group=group.handle))
    return [work for work in works if work is not None]


def start_shift(outgoing: Tensor, incoming: Tensor, group: Group, distance: int = 1) -> list[dist.Work]:
    """Begin to send to the next rank of the group, and to receive from the one before, or to and from those that are
    further away; returns what to wait for."""
    to, source = ((group.rank + places) % group.size for places in (distance, -distance))
    pair = (dist.isend, outgoing, to), (dist.irecv, incoming, source)
    works: list[dist.Work] = dist.batch_isend_irecv(
        [dist.P2POp(call, message, group.ranks[peer], group=group.handle) for call, message, peer in pair]
    )
    return works


def sum_among(tensor: Tensor, group: Group, members: Sequence[int]) -> None:
    """Sum a contiguous tensor in place over some ranks of a group, without a separate communicator, in the order of
    `members` (positions in the group, ascending): every one of them gets the same bits."""
    for part in tensor.view(-1).split(_PART):
        _sum_part(part, group, members)


def _sum_part(part: Tensor, group: Group, members: Sequence[int]) -> None:
    """`sum_among` of a part that is small enough for buffers; they are freed on return."""
    others = [member for member in members if member != group.rank]
    terms = {member: torch.empty_like(part) for member in others} | {group.rank: part}
    operations = [
        dist.P2POp(call, message, group.ranks[member], group=group.handle)
        for member in others
        for call, message in ((dist.isend, part), (dist.irecv, terms[member]))
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    total, *rest = (terms[member] for member in members)
    for term in rest:
        total += term
    if total is not part:
        part.copy_(total)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """One small Python value from every rank, in group order, on the first rank; on others those that passed through.
    Along a binomial tree: n - 1 transfers in log2 n rounds, where gloo's all-gather makes n (n - 1)."""
    held, distance = [value], 1
    while distance < group.size:
        if group.rank & distance:
            dist.send_object_list([held], group.ranks[group.rank - distance], group=group.handle)
            break
        if group.rank + distance < group.size:
            received: list[Any] = [None]
            dist.recv_object_list(received, group.ranks[group.rank + distance], group=group.handle)
            held += received[0]
        distance *= 2
    return held
