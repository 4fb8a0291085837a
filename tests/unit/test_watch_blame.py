"""The verdict on ranks that stand still: by hand for each kind of evidence, then on generated programs.

These consist of collectives and messages, and one rank halts or leaves an operation out. An innocent rank is
never named with certainty.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from megacore.parallel.heartbeat import Channel, Phase
from megacore.watch import nodes
from megacore.watch.blame import Seen, blame
from megacore.watch.ledger import Flag
from megacore.watch.nodes import Nodes
from megacore.watch.stragglers import Noticed, Times, slowest
from tests.patience import patience
from tests.unit.watch_records import seen

WORLD = Channel((0, 1, 2, 3))
PAIR, BACK = Channel((0, 1)), Channel((1, 0))


def in_collective(rank: int, channel: Channel = WORLD, awaited: int = 5, **changes: Any) -> Seen:
    values = {"phase": Phase.ALL_REDUCE, "channel": channel, "awaited": awaited, "posted": {channel: awaited}}
    return seen(rank, 4, **{**values, **changes})


def behind(rank: int, **changes: Any) -> Seen:
    """A rank that has not begun what the others wait for."""
    return seen(rank, 4, **{"posted": {WORLD: 4}, **changes})


def finished(rank: int, **changes: Any) -> Seen:
    return seen(rank, 4, phase=Phase.DONE, section=Phase.DONE, **changes)


def crossed(deviation: int = 0) -> list[Seen]:
    """Two ranks that each wait in a group in which the other one does not come."""
    first, second = {PAIR: 3, BACK: 1}, {PAIR: 2, BACK: 2}
    return [
        seen(0, 2, phase=Phase.ALL_REDUCE, channel=PAIR, awaited=3, posted=first),
        seen(1, 2, phase=Phase.ALL_REDUCE, channel=BACK, awaited=2, posted=second, deviation=deviation),
    ]


def computing(rank: int, phase: Phase, number: int, **changes: Any) -> Seen:
    """A rank whose device works on what it has posted."""
    return seen(rank, 2, phase=phase, posted={PAIR: number}, flags=Flag.ASYNCHRONOUS, **changes)


def of_bytes(*sizes: int) -> list[Seen]:
    return [in_collective(rank, nbytes=size) for rank, size in enumerate(sizes)]


def through_other_groups() -> list[Seen]:
    tp, message = Channel((2, 3)), Channel((3, 2), is_message=True)
    posted = {WORLD: 4, tp: 3}
    receiving = seen(2, 4, phase=Phase.RECEIVE, channel=message, awaited=9, posted={**posted, message: 9})
    return [*TWO, receiving, seen(3, 4, phase=Phase.BACKWARD, posted={**posted, message: 8})]


TWO, THREE = ([in_collective(rank) for rank in range(count)] for count in (2, 3))
FINISHED = "ranks 0 to 2 wait for it; it has finished"
AHEAD = computing(0, Phase.OPTIMIZER, 6)
# What each rank does -> the verdict, with a ? where it is uncertain, and a part of why.
VERDICTS: dict[str, tuple[list[Seen], str, str]] = {
    # Its node may have no ledgers.
    "a rank without a ledger comes first": ([*TWO, seen(3, 4, state="stopped")], "absent 2?", ""),
    "a dead process comes before the graph": ([*TWO, in_collective(2, state="gone"), behind(3)], "gone 2", ""),
    "and a stopped one": ([*TWO, in_collective(2, state="stopped"), behind(3)], "stopped 2", ""),
    "who has posted least": ([*THREE, behind(3, phase=Phase.DATA)], "holds up 3", "ranks 0 to 2 wait for it"),
    "a wait is followed through other groups": (through_other_groups(), "holds up 3", ""),
    "two hold up": ([*TWO, behind(2), behind(3)], "holds up 2, 3?", ""),
    "who has finished, or the others do too much": ([*THREE, finished(3, posted={WORLD: 4})], "holds up 3?", FINISHED),
    "and is gone": ([*THREE, finished(3, posted={WORLD: 4}, state="gone")], "holds up 3?", FINISHED),
    "who has finished and owes nothing is innocent": (
        [in_collective(0, PAIR), behind(1, posted={PAIR: 4}), *(finished(r, posted={WORLD: 4}) for r in (2, 3))],
        "holds up 1", "",
    ),
    "the last at work": ([seen(0, 4, phase=Phase.SAVE), *(finished(r) for r in (1, 2, 3))], "holds up 0", ""),
    "who alone runs after all have posted": ([in_collective(r, is_busy=r == 2) for r in range(4)], "holds up 2?", ""),
    "two run": ([in_collective(r, is_busy=r in (1, 2)) for r in range(4)], "undetermined ?", ""),
    "one waits for its device": (
        [in_collective(r, is_busy=r == 2, flags=Flag.ASYNCHRONOUS) for r in range(4)], "undetermined ?", "",
    ),
    "a circle": (crossed(), "cycle 0, 1?", ""),
    "who left its order caused the circle": (crossed(deviation=7), "deviates 1", ""),
    "two sizes": (
        of_bytes(16, 16, 8, 8), "undetermined ?",
        "all-reduce of 16 bytes on ranks 0, 1, all-reduce of 8 bytes on ranks 2, 3",
    ),
    "the one size that differs": (
        of_bytes(16, 16, 8, 16), "deviates 2?",
        "all-reduce of 16 bytes on ranks 0, 1, 3, all-reduce of 8 bytes on rank 2",
    ),
    "compiled code": ([in_collective(0, PAIR), seen(1, 2, posted={PAIR: 4}, flags=Flag.HIDDEN)], "holds up 1?", ""),
    "behind on a device, and for longer": ([AHEAD, computing(1, Phase.DATA, 5, age=25.0)], "holds up 1", ""),
    "behind on a device": ([AHEAD, computing(1, Phase.DATA, 5, age=15.0)], "holds up 1?", ""),
    "outside of the engine": (
        [in_collective(0, PAIR), seen(1, 2, phase=Phase.OUTSIDE, posted={PAIR: 4})],
        "holds up 1?", "the program's code may itself wait",
    ),
    "one process": ([seen(0, 1, phase=Phase.DATA)], "holds up 0", ""),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "said", "why"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict(ranks: list[Seen], said: str, why: str) -> None:
    verdict = blame(ranks, ranks[-1].record.identity.world_size)
    assert f"{verdict.kind} {', '.join(map(str, verdict.ranks))}{'?' * (not verdict.is_certain)}" == said
    assert why in verdict.why


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
            waits: dict[str, Any] = {"channel": channel, "awaited": number, "posted": self.posted[rank]}
            waits |= {"phase": Phase.DATA, "age": 20.0} if rank in self.halted else {"phase": kind, "age": 19.0}
            found.append(seen(rank, self.world, **waits, deviation=deviation * (rank == culprit)))
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
    ends = [(number[p, d, t], number[p + 1, d, t]) for p, d, t in number if p + 1 < pp]
    pairs = [Channel(pair[::way], is_message=True) for pair in ends for way in (1, -1)]
    kinds = [Phase.ALL_REDUCE, Phase.ALL_GATHER]
    step = [(draw.choice(kinds), draw.choice(groups)) for _ in range(draw.randint(3, 12))]
    step += [(Phase.RECEIVE, pair) for pair in pairs if draw.random() < 0.7]
    draw.shuffle(step)
    step.append((Phase.ALL_REDUCE, groups[0]))  # every step ends with one that all ranks take part in
    return Machine(world, step * draw.randint(1, 4), lag=draw.choice([0, 0, 1, 3]))


def hung(seed: int, *, skips: bool) -> tuple[Machine, int]:
    """A machine in which a rank has halted, or left an operation out; and which."""
    draw = random.Random(seed)
    ranks = machine(draw)
    culprit = draw.randrange(ranks.world)
    operations = sum(culprit in channel.ranks for _, channel in ranks.program)
    ranks.run(culprit, draw.randrange(operations), skips=skips)
    return ranks, culprit


def test_a_rank_that_halts_is_named() -> None:
    for seed in range(300):
        ranks, culprit = hung(seed, skips=False)
        verdict = blame(ranks.seen(culprit, deviation=0), ranks.world)
        assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (culprit,), True), seed


@pytest.mark.parametrize("deviation", [0, 3])
def test_who_leaves_an_operation_out_is_named_and_no_innocent_with_certainty(deviation: int) -> None:
    waits = 0
    for seed in range(1000, 1300):
        ranks, culprit = hung(seed, skips=True)
        if not ranks.waiting:
            continue  # it left the last one of a channel out, and nobody waits for it
        waits += 1
        verdict = blame(ranks.seen(culprit, deviation=deviation), ranks.world)
        assert not verdict.is_certain or verdict.ranks == (culprit,), seed
        if deviation:
            assert verdict.ranks == (culprit,), seed
    assert waits > 200


# ---- stragglers ------------------------------------------------------------------------------------------------------

STAGES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
EVEN = {rank: Times(compute=0.1 if stage == 0 else 0.4) for rank, stage in STAGES.items()}


def test_a_rank_is_compared_with_its_stage_and_not_with_a_longer_one() -> None:
    found = slowest(EVEN | {1: Times(compute=0.2)}, STAGES)
    assert found.rank == 1
    assert (found.ratio, found.excess) == pytest.approx((2.0, 0.1))
    assert slowest(EVEN, STAGES).ratio == 1.0
    assert slowest({0: Times(compute=0.1), 1: Times(compute=0.3)}, {0: 0, 1: 0}).ratio == pytest.approx(3.0)


def test_a_slow_rank_is_named_once_after_two_windows_and_again_after_it_was_fast() -> None:
    noticed, slow = Noticed(), EVEN | {4: Times(compute=0.6, data=0.02)}

    def named(times: dict[int, Times]) -> int | None:
        of_ten = {rank: Times(*(10 * value for value in astuple(one))) for rank, one in times.items()}
        found = noticed.add(of_ten, 10, STAGES)
        assert found is None or found.times.compute == pytest.approx(0.6)
        return None if found is None else found.rank

    assert [named(slow) for _ in range(8)] == [None, None, None, 4, None, None, None, None]
    assert [named(EVEN) for _ in range(4)] == [None] * 4
    assert [named(slow) for _ in range(4)] == [None, None, None, 4]


# ---- several nodes ---------------------------------------------------------------------------------------------------

BOTH = Channel((0, 1))


@pytest.fixture
def pair() -> Iterator[tuple[Nodes, Nodes]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    yield Nodes(environment, 0, 2, 1), Nodes(environment, 1, 2, 1)
    del store  # which serves until here


def test_the_first_node_puts_all_ranks_together_and_its_verdict_reaches_the_others(
    pair: tuple[Nodes, Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    assert (first.decides, second.decides) == (True, False)
    assert first.others() is None  # nothing is known of the second node yet
    sleeping = seen(1, 2, phase=Phase.DATA, posted={BOTH: 4})
    second.publish([sleeping], 3.0, urgent=False)
    assert first.others() is None  # it may yet move
    second.publish([sleeping], 9.0, urgent=True)
    others = first.others()
    assert others is not None
    ((ranks, still),) = others
    assert ranks == [sleeping]
    assert 9.0 <= still < 9.5
    waiting = seen(0, 2, phase=Phase.ALL_REDUCE, channel=BOTH, awaited=5, posted={BOTH: 5})
    verdict = blame([waiting, *ranks], 2)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (1,), True)
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: None)
    assert second.verdict() is None
    first.pronounce("megacore: hang at step 7")
    assert second.verdict() == "megacore: hang at step 7"


def test_a_store_that_does_not_answer_holds_nothing_up(
    pair: tuple[Nodes, Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for an answer over a connection that is cut for as long as TCP does, which is many minutes."""
    _, second = pair
    monkeypatch.setattr(nodes, "PATIENCE", timedelta(seconds=0.1))
    back = threading.Event()

    class Cut:
        def check(self, keys: list[str]) -> bool:
            return back.wait(patience(10)) and False

    second._store = Cut()
    began = time.perf_counter()
    assert second.verdict() is None
    assert second.verdict() is None
    second.publish([seen(1, 2)], 9.0, urgent=True)
    assert time.perf_counter() - began < patience(2)
    back.set()
