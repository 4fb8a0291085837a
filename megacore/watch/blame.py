"""Who holds a hung run up: a pure function from the ranks' ledgers to a verdict.

In this order: a rank that wrote nothing, a process that is gone, one that is stopped. Then the wait-for graph: a rank
waits for the members that have posted fewer operations on its channel. Where the waits lead to ranks outside
communication, or that have finished, those hold the others up. In a circle, a rank that alone has left its usual order
of operations has caused it. Else one alone that runs while all sleep probably loops. A verdict that evidence does not
prove is not certain, and may be "undetermined".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megacore.config.messages import ranks_in_words
from megacore.parallel.heartbeat import Phase
from megacore.watch.ledger import Flag
from megacore.watch.record import Record

State = Literal["running", "stopped", "gone"]
Kind = Literal["absent", "gone", "stopped", "holds up", "deviates", "cycle", "undetermined"]
_COMPUTING = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP, Phase.FIRST_STEP})
_FRESH = 0.5  # of the age of the oldest mark: a rank that has moved later is not what stopped the others


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A rank as its node's watcher sees it: its ledger, and the state of its process."""

    record: Record
    state: State = "running"  # of the process
    is_busy: bool = False  # whether its main thread is on a processor, and not asleep until others have done something

    @property
    def rank(self) -> int:
        return self.record.rank

    @property
    def is_done(self) -> bool:
        return self.record.phase is Phase.DONE

    @property
    def is_outside(self) -> bool:
        """Whether it computes what megacore knows nothing of, and may take as long as it likes, or end."""
        return self.record.phase is Phase.OUTSIDE


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who blocks the run."""

    kind: Kind
    ranks: tuple[int, ...] = ()  # the culprits; of a cycle its members; empty if undetermined
    is_certain: bool = False  # whether the evidence leaves no other explanation
    why: str = ""  # a sentence for a person


def blame(seen: Iterable[Seen], world_size: int) -> Verdict:
    """The verdict on ranks with a ledger that have stopped moving."""
    by_rank = {one.rank: one for one in seen}
    absent = tuple(rank for rank in range(world_size) if rank not in by_rank)
    if absent:
        why = f"{_plural(absent, 'it has', 'they have')} written nothing: never started, out of reach, or not watched"
        return Verdict(kind="absent", ranks=absent, why=why)
    for state, words in (("gone", "ended without a word"), ("stopped", "stopped by a signal or a debugger")):
        ranks = tuple(rank for rank, one in sorted(by_rank.items()) if one.state == state and not one.is_done)
        if ranks:
            why = f"the {_plural(ranks, 'process is', 'processes are')} {words}"
            return Verdict(kind="gone" if state == "gone" else "stopped", ranks=ranks, is_certain=True, why=why)
    return _of_graph(by_rank)


def waits(by_rank: Mapping[int, Seen]) -> dict[int, frozenset[int]]:
    """The wait-for graph: rank -> ranks that it certainly waits for."""
    return {rank: _waits_of(one.record, by_rank) for rank, one in by_rank.items()}


def _waits_of(record: Record, by_rank: Mapping[int, Seen]) -> frozenset[int]:
    awaited = {record.channel: record.awaited} if record.phase.communicates and record.channel is not None else {}
    if record.flags & Flag.ASYNCHRONOUS and record.phase is not Phase.DONE:
        awaited = dict(record.posted) | awaited  # whatever the program does, the device works through all it was given
    lower = {
        rank
        for channel, count in awaited.items()
        for rank in channel.ranks
        if rank != record.rank and by_rank[rank].record.posted.get(channel, 0) < count
    }
    return frozenset(lower)


def _of_graph(by_rank: Mapping[int, Seen]) -> Verdict:
    edges = waits(by_rank)
    blocked = {rank for rank in by_rank if edges[rank] or by_rank[rank].record.phase.communicates}
    outside = {rank for rank in by_rank if rank not in blocked and not by_rank[rank].is_done}
    reached = _reachable(blocked, edges) if blocked else outside
    holders = tuple(sorted(reached - blocked))  # who has finished is among them only if somebody waits for it
    if not holders:
        return _of_circle(by_rank, edges, blocked, outside)
    oldest = max(by_rank[rank].record.age for rank in holders)
    holders = tuple(rank for rank in holders if by_rank[rank].record.age >= _FRESH * oldest)
    doubts = list(_doubts(holders, by_rank))
    waiting = sorted(rank for rank in blocked if _reachable({rank}, edges) & set(holders))
    why = f"{ranks_in_words(waiting)} {_plural(waiting, 'waits', 'wait')} for it" if waiting else "no rank waits"
    why = why if len(holders) == 1 else why.replace("for it", "for them")
    return Verdict(
        kind="holds up", ranks=holders, is_certain=not doubts, why="; ".join([why, *doubts]) if doubts else why
    )


def _doubts(holders: Sequence[int], by_rank: Mapping[int, Seen]) -> Iterable[str]:
    """Why the ranks that the waits lead to may still be innocent."""
    records = [by_rank[rank].record for rank in holders]
    if len(holders) > 1:
        yield "one of them may wait for another in a way that the ledger does not show"
    if any(record.phase is Phase.DONE for record in records):
        yield "it has finished as if there were no more to do, in which the others may be wrong"
    if any(record.phase is Phase.OUTSIDE for record in records):
        yield "the program's code may itself wait for another rank"
    if any(record.flags & Flag.HIDDEN and record.phase in _COMPUTING for record in records):
        yield "compiled code communicates unseen, so it may itself wait"
    if any(record.flags & Flag.ASYNCHRONOUS for record in records):
        oldest = max(one.record.age for one in by_rank.values())
        if min(record.age for record in records) < 0.9 * oldest:
            yield "the device may be behind what the ledger shows"


def _of_circle(
    by_rank: Mapping[int, Seen], edges: Mapping[int, frozenset[int]], blocked: set[int], outside: set[int]
) -> Verdict:
    """The verdict where no wait leads to a rank outside communication."""
    odd = tuple(rank for rank, one in sorted(by_rank.items()) if one.record.deviation)
    if odd and len(odd) < len(by_rank) and 2 * len(odd) <= len(by_rank):
        step = by_rank[odd[0]].record.deviation
        why = f"it left the order in which it communicates in every step, in step {step}; the others kept it"
        alone = len(odd) == 1
        return Verdict(kind="deviates", ranks=odd, is_certain=alone, why=why if alone else why.replace("it ", "they "))
    circle = _circle(edges)
    if circle:
        return Verdict(kind="cycle", ranks=circle, why=f"{ranks_in_words(circle)} wait for each other")
    stuck = sorted(rank for rank in blocked if not edges[rank])
    if (differing := _differing(stuck, by_rank)) is not None:
        return differing
    if len(outside) == 1 and not any(by_rank[rank].record.flags & Flag.HIDDEN for rank in outside):
        why = "every rank has posted what the others wait for, and it alone is outside communication"
        return Verdict(kind="holds up", ranks=tuple(outside), why=why)
    busy = tuple(rank for rank in stuck if by_rank[rank].is_busy)
    if len(busy) == 1 and not any(by_rank[rank].record.flags & Flag.ASYNCHRONOUS for rank in stuck):
        why = "every rank has posted what the others wait for, and it alone does not sleep: its program runs on"
        return Verdict(kind="holds up", ranks=busy, why=why)
    everyone = "every rank has posted what the others wait for"
    return Verdict(kind="undetermined", why=f"{everyone}: the network, or operations that do not match")


def _differing(ranks: Sequence[int], by_rank: Mapping[int, Seen]) -> Verdict | None:
    """The verdict on members of one operation that disagree on what it is, if there are any."""
    for rank in ranks:
        record = by_rank[rank].record
        if record.phase.is_message:
            continue
        members = [by_rank[other].record for other in ranks]
        members = [m for m in members if (m.channel, m.awaited) == (record.channel, record.awaited)]
        groups: dict[str, list[int]] = {}
        for member in members:
            groups.setdefault(f"{member.phase.in_words} of {member.nbytes:,} bytes", []).append(member.rank)
        if len(groups) > 1:
            sizes = ", ".join(f"{what} on {ranks_in_words(those)}" for what, those in groups.items())
            why = f"they take part in the same operation with different sizes: {sizes}"
            odd = min(groups.values(), key=len)
            if len(groups) == 2 and len(odd) == 1 and len(members) > 2:
                return Verdict(kind="deviates", ranks=tuple(odd), why=why)
            return Verdict(kind="undetermined", why=why)
    return None


def _reachable(start: Iterable[int], edges: Mapping[int, frozenset[int]]) -> set[int]:
    """The ranks that the waits lead to, those of the start included."""
    seen, waiting = set(start), list(start)
    while waiting:
        new = edges[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def _circle(edges: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """The ranks of a circle that the waits lead to and that they do not leave; empty if there is none."""
    reach = {rank: _reachable(others, edges) for rank, others in edges.items()}
    for rank in sorted(edges):
        if rank in reach[rank] and all(rank in reach[other] for other in reach[rank]):
            return tuple(sorted(reach[rank]))
    return ()


def _plural(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
