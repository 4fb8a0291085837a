"""The verdict on ranks that stand still: by hand for each kind of evidence, then on generated programs.

These consist of collectives and messages, and one rank halts or leaves an operation out. An innocent rank is
never named with certainty.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megacore.watch.blame import Seen, blame, waits
from megacore.watch.ledger import Channel, Flag, Ledger, Phase
from megacore.watch.record import LedgerFile, Record
from tests.unit.watch_records import identity, seen

WORLD = Channel((0, 1, 2, 3))
PAIR = Channel((0, 1))


def in_collective(rank: int, channel: Channel = WORLD, awaited: int = 5, **changes: Any) -> Seen:
    values = {"phase": Phase.ALL_REDUCE, "channel": channel, "awaited": awaited, "posted": {channel: awaited}}
    return seen(rank, 4, **{**values, **changes})


def test_a_rank_without_a_ledger_comes_first() -> None:
    verdict = blame([in_collective(0), in_collective(1), seen(3, 4, state="stopped")], 4)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("absent", (2,), False)  # its node may have no ledgers


@pytest.mark.parametrize("state", ["gone", "stopped"])
def test_the_state_of_a_process_comes_before_the_graph(state: Any) -> None:
    ranks = [in_collective(0), in_collective(1), in_collective(2, state=state), seen(3, 4, posted={WORLD: 4})]
    verdict = blame(ranks, 4)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == (state, (2,), True)


def test_the_rank_that_has_posted_least_holds_the_group_up() -> None:
    ranks = [*(in_collective(rank) for rank in (0, 1, 2)), seen(3, 4, phase=Phase.DATA, posted={WORLD: 4})]
    verdict = blame(ranks, 4)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (3,), True)
    assert "ranks 0 to 2 wait for it" in verdict.why


def test_a_wait_is_followed_through_other_groups() -> None:
    tp, message = Channel((2, 3)), Channel((3, 2), is_message=True)
    ranks = [
        in_collective(0),
        in_collective(1),
        seen(2, 4, phase=Phase.RECEIVE, channel=message, awaited=9, posted={WORLD: 4, message: 9, tp: 3}),
        seen(3, 4, phase=Phase.BACKWARD, posted={WORLD: 4, message: 8, tp: 3}),
    ]
    assert blame(ranks, 4).ranks == (3,)


def test_two_holders_are_named_without_certainty() -> None:
    ranks = [in_collective(0), in_collective(1), *(seen(rank, 4, posted={WORLD: 4}) for rank in (2, 3))]
    verdict = blame(ranks, 4)
    assert (verdict.ranks, verdict.is_certain) == ((2, 3), False)


def finished(rank: int, **changes: Any) -> Seen:
    return seen(rank, 4, phase=Phase.DONE, section=Phase.DONE, **changes)


@pytest.mark.parametrize("state", ["running", "gone"])
def test_a_rank_that_has_finished_holds_those_up_that_wait_for_it(state: Any) -> None:
    ranks = [*(in_collective(rank) for rank in (0, 1, 2)), finished(3, posted={WORLD: 4}, state=state)]
    verdict = blame(ranks, 4)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (3,), False)  # or the others do too much
    assert "ranks 0 to 2 wait for it; it has finished" in verdict.why


def test_a_rank_that_has_finished_and_owes_nothing_is_innocent() -> None:
    rest, pair = seen(1, 4, phase=Phase.SAVE, posted={PAIR: 4}), in_collective(0, PAIR)
    verdict = blame([pair, rest, *(finished(rank, posted={WORLD: 4}) for rank in (2, 3))], 4)
    assert (verdict.ranks, verdict.is_certain) == ((1,), True)
    alone = blame([seen(0, 4, phase=Phase.SAVE), *(finished(rank) for rank in (1, 2, 3))], 4)
    assert (alone.ranks, alone.is_certain) == ((0,), True)


@pytest.mark.parametrize(("busy", "flags", "named"), [((2,), 0, (2,)), ((1, 2), 0, ()), ((2,), Flag.ASYNCHRONOUS, ())])
def test_a_rank_that_alone_runs_after_all_have_posted_probably_loops(busy: Any, flags: int, named: Any) -> None:
    verdict = blame([in_collective(rank, is_busy=rank in busy, flags=flags) for rank in range(4)], 4)
    assert (verdict.ranks, verdict.is_certain) == (named, False)


def test_a_circle_is_said_to_be_one() -> None:
    other = Channel((1, 0))
    ranks = [
        seen(0, 2, phase=Phase.ALL_REDUCE, channel=PAIR, awaited=3, posted={PAIR: 3, other: 1}),
        seen(1, 2, phase=Phase.ALL_REDUCE, channel=other, awaited=2, posted={PAIR: 2, other: 2}),
    ]
    verdict = blame(ranks, 2)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("cycle", (0, 1), False)


def test_the_rank_that_left_its_order_caused_the_circle() -> None:
    other = Channel((1, 0))
    ranks = [
        seen(0, 2, phase=Phase.ALL_REDUCE, channel=PAIR, awaited=3, posted={PAIR: 3, other: 1}),
        seen(1, 2, phase=Phase.ALL_REDUCE, channel=other, awaited=2, posted={PAIR: 2, other: 2}, deviation=7),
    ]
    verdict = blame(ranks, 2)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("deviates", (1,), True)


def test_the_ledgers_of_a_run_in_which_a_rank_leaves_a_collective_out_name_it(tmp_path: Path) -> None:
    """Two stages of two replicas. Rank 0 leaves the sum over its pipeline out and goes on to the next step."""
    ledgers = [Ledger(tmp_path, identity(rank, 4, degrees={"pp": 2, "dp": 2, "tp": 1})) for rank in range(4)]
    dp, pp = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]

    def messages(rank: int) -> list[tuple[Phase, tuple[int, ...], int]]:
        there, back = (rank % 2, rank % 2 + 2), (rank % 2 + 2, rank % 2)
        mine = (Phase.SEND, Phase.RECEIVE) if rank < 2 else (Phase.RECEIVE, Phase.SEND)
        return [(mine[0], there, 64), (mine[1], back, 64)]

    def do(rank: int, *operations: tuple[Phase, tuple[int, ...], int]) -> None:
        for operation in operations:
            with ledgers[rank].post(*operation):
                pass

    for step in range(1, 5):
        for rank, ledger in enumerate(ledgers):
            sums = [(Phase.ALL_REDUCE, dp[rank], 256), (Phase.ALL_REDUCE, dp[rank], 8), (Phase.ALL_REDUCE, pp[rank], 8)]
            ledger.begin_step(step)
            if step < 4 or rank % 2:  # the other pipeline does all of step 4
                do(rank, *messages(rank), *sums)
                ledger.end_step()
            else:
                do(rank, *messages(rank), *sums[:2])
    ledgers[0].end_step()
    ledgers[0].begin_step(5)
    do(0, messages(0)[0])
    waiting = [
        *(ledgers[0].post(*messages(0)[1]), ledgers[2].post(Phase.ALL_REDUCE, pp[2], 8)),
        *(ledgers[rank].post(Phase.ALL_REDUCE, dp[rank], 256) for rank in (1, 3)),
    ]
    for operation in waiting:
        operation.__enter__()
    records = [Seen(record=LedgerFile(tmp_path / f"rank-{rank}.ledger").record()) for rank in range(4)]
    assert waits({one.rank: one for one in records}) == {0: {2}, 1: {0}, 2: {0}, 3: {2}}
    verdict = blame(records, 4)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("deviates", (0,), True)
    assert "it left the order in which it communicates in every step, in step 4; the others kept it" in verdict.why


def test_operations_that_do_not_match_are_named_with_the_one_rank_that_differs() -> None:
    verdict = blame([in_collective(rank, nbytes=8 if rank > 1 else 16) for rank in range(4)], 4)
    assert (verdict.kind, verdict.ranks) == ("undetermined", ())
    assert "all-reduce of 16 bytes on ranks 0, 1, all-reduce of 8 bytes on ranks 2, 3" in verdict.why
    verdict = blame([in_collective(rank, nbytes=8 if rank == 2 else 16) for rank in range(4)], 4)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("deviates", (2,), False)
    assert "all-reduce of 16 bytes on ranks 0, 1, 3, all-reduce of 8 bytes on rank 2" in verdict.why


def test_compiled_code_and_devices_leave_doubt() -> None:
    hidden = blame([in_collective(0, PAIR), seen(1, 2, posted={PAIR: 4}, flags=Flag.HIDDEN)], 2)
    assert (hidden.ranks, hidden.is_certain) == ((1,), False)
    ahead, behind = {PAIR: 6}, {PAIR: 5}
    device = [
        seen(0, 2, phase=Phase.OPTIMIZER, posted=ahead, flags=Flag.ASYNCHRONOUS),
        seen(1, 2, phase=Phase.DATA, posted=behind, flags=Flag.ASYNCHRONOUS, age=25.0),
    ]
    assert blame(device, 2).ranks == (1,)
    assert blame(device, 2).is_certain
    late = [device[0], seen(1, 2, phase=Phase.DATA, posted=behind, flags=Flag.ASYNCHRONOUS, age=15.0)]
    assert not blame(late, 2).is_certain


def test_a_rank_outside_of_the_engine_may_wait_for_something_else() -> None:
    posted = {Channel((0, 1)): 3}
    waiting = seen(0, 2, phase=Phase.ALL_REDUCE, channel=Channel((0, 1)), awaited=3, posted=posted)
    verdict = blame([waiting, seen(1, 2, phase=Phase.OUTSIDE, posted={Channel((0, 1)): 2})], 2)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (1,), False)
    assert "the program's code may itself wait" in verdict.why


def test_one_process_is_named_for_itself() -> None:
    assert blame([seen(0, 1, phase=Phase.DATA)], 1).ranks == (0,)


# ---- generated programs


@dataclass
class Machine:
    """Ranks that run through operations in one global order, each those that it takes part in; it waits now or later.

    Attributes:
        posted: operations that a rank has begun on each channel.
        waiting: of each rank (kind, channel, number) of the operation that it waits for.
    """

    world: int
    program: list[tuple[Phase, Channel]]
    lag: int
    posted: list[dict[Channel, int]] = field(default_factory=list)
    waiting: dict[int, tuple[Phase, Channel, int]] = field(default_factory=dict)
    halted: set[int] = field(default_factory=set)

    def run(self, culprit: int, at: int, *, skips: bool) -> None:
        """Run until nothing moves. The culprit halts before its operation number `at`, or leaves it out."""
        self.posted = [{} for _ in range(self.world)]
        todo = {r: [(kind, c) for kind, c in self.program if r in c.ranks] for r in range(self.world)}
        todo[culprit] = todo[culprit][:at] + (todo[culprit][at + 1 :] if skips else [(Phase.DATA, Channel(()))])
        queues: dict[int, list[tuple[Phase, Channel, int]]] = {r: [] for r in range(self.world)}
        moved = True
        while moved:
            moved = False
            for rank in range(self.world):
                while rank not in self.halted:
                    if queues[rank] and (len(queues[rank]) > self.lag or not todo[rank]):
                        kind, channel, number = queues[rank][0]
                        if any(self.posted[r].get(channel, 0) < number for r in channel.ranks):
                            self.waiting[rank] = queues[rank][0]
                            break
                        queues[rank].pop(0)
                        self.waiting.pop(rank, None)
                    elif todo[rank]:
                        kind, channel = todo[rank].pop(0)
                        if kind is Phase.DATA:
                            self.halted.add(rank)
                            break
                        self.posted[rank][channel] = self.posted[rank].get(channel, 0) + 1
                        queues[rank].append((kind, channel, self.posted[rank][channel]))
                    else:
                        break
                    moved = True

    def seen(self, culprit: int, *, deviation: int) -> list[Seen]:
        """The records that the ranks would leave; who has nothing left to do is in its exit."""
        found = []
        for rank in range(self.world):
            kind, channel, number = self.waiting.get(rank, (Phase.EXIT, None, 0))
            kind = Phase.DATA if rank in self.halted else kind
            record = Record(
                identity=identity(rank, self.world),
                phase=kind,
                section=Phase.STEP,
                age=20.0 if rank in self.halted else 19.0,
                channel=channel,
                awaited=number,
                posted=self.posted[rank],
                deviation=deviation if rank == culprit else 0,
            )
            found.append(Seen(record=record))
        return found


def machine(draw: random.Random) -> Machine:
    """Two to eight ranks as pp x dp x tp, and some steps of messages and collectives between them."""
    pp, dp, tp = draw.choice([(1, 2, 1), (2, 1, 1), (1, 1, 3), (2, 2, 1), (1, 2, 2), (3, 2, 1), (2, 2, 2), (1, 1, 8)])
    number = {(p, d, t): (p * dp + d) * tp + t for p in range(pp) for d in range(dp) for t in range(tp)}
    world = pp * dp * tp
    groups = [Channel(tuple(range(world)))]
    groups += [Channel(tuple(number[p, d, t] for t in range(tp))) for p in range(pp) for d in range(dp)]
    groups += [Channel(tuple(number[p, d, t] for d in range(dp))) for p in range(pp) for t in range(tp)]
    groups = list(dict.fromkeys(group for group in groups if len(group.ranks) > 1))
    pairs = [
        Channel((number[p, d, t], number[p + 1, d, t])[::way], is_message=True)
        for (p, d, t) in number
        for way in (1, -1)
        if p + 1 < pp
    ]
    step = [
        (draw.choice([Phase.ALL_REDUCE, Phase.ALL_GATHER]), draw.choice(groups)) for _ in range(draw.randint(3, 12))
    ]
    step += [(Phase.RECEIVE, pair) for pair in pairs if draw.random() < 0.7]
    draw.shuffle(step)
    step.append((Phase.ALL_REDUCE, groups[0]))  # every step ends with one that all ranks take part in
    return Machine(world, step * draw.randint(1, 4), lag=draw.choice([0, 0, 1, 3]))


def operations_of(machine: Machine, rank: int) -> int:
    return sum(rank in channel.ranks for _, channel in machine.program)


def test_a_rank_that_halts_is_named() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        ranks = machine(draw)
        culprit = draw.randrange(ranks.world)
        ranks.run(culprit, draw.randrange(operations_of(ranks, culprit)), skips=False)
        verdict = blame(ranks.seen(culprit, deviation=0), ranks.world)
        assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (culprit,), True), seed


@pytest.mark.parametrize("deviation", [0, 3])
def test_who_leaves_an_operation_out_is_named_and_no_innocent_with_certainty(deviation: int) -> None:
    hung = 0
    for seed in range(1000, 1300):
        draw = random.Random(seed)
        ranks = machine(draw)
        culprit = draw.randrange(ranks.world)
        ranks.run(culprit, draw.randrange(operations_of(ranks, culprit)), skips=True)
        if not ranks.waiting:
            continue  # it left the last one of a channel out, and nobody waits for it
        hung += 1
        verdict = blame(ranks.seen(culprit, deviation=deviation), ranks.world)
        assert not verdict.is_certain or verdict.ranks == (culprit,), seed
        if deviation:
            assert verdict.ranks == (culprit,), seed
    assert hung > 200
