"""The slow rank is named beside its own stage, once, and not for what it waits for; equal ranks are left alone."""

from __future__ import annotations

import pytest

from megacore.watch.ledger import Phase
from megacore.watch.stragglers import Noticed, Times, slowest, times_between

STAGES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
EVEN = {rank: Times(compute=0.1 if stage == 0 else 0.4) for rank, stage in STAGES.items()}


def test_a_rank_is_compared_with_its_stage_and_not_with_a_longer_one() -> None:
    found = slowest(EVEN | {1: Times(compute=0.2)}, STAGES)
    assert found.rank == 1
    assert (found.ratio, found.excess) == pytest.approx((2.0, 0.1))
    assert slowest(EVEN, STAGES).ratio == 1.0
    assert slowest({0: Times(compute=0.1), 1: Times(compute=0.3)}, {0: 0, 1: 0}).ratio == pytest.approx(3.0)


def test_ranks_are_compared_in_a_time_that_grows_with_their_number() -> None:
    """Every rank of a job does so at every logged step."""

    class Counted(dict[int, int]):
        read = 0

        def __getitem__(self, rank: int) -> int:
            self.read += 1
            return super().__getitem__(rank)

    stages = Counted({rank: rank % 4 for rank in range(64)})
    times = {rank: Times(compute=2.0 if rank == 9 else 1.0) for rank in stages}
    found = slowest(times, stages)
    assert (found.rank, found.ratio) == (9, 2.0)
    assert stages.read <= 2 * len(stages)


def test_waits_and_garbage_collection_are_no_computing() -> None:
    before, after = [1.0] * 64, [1.0] * 64
    for phase, seconds in {Phase.FORWARD: 2.0, Phase.BACKWARD: 3.0, Phase.DATA: 5.0, Phase.ALL_REDUCE: 7.0}.items():
        after[phase] += seconds
    after[Phase.RECEIVE] += 1.0
    assert times_between(before, after, gc=0.5) == Times(compute=4.5, data=5.0, gc=0.5, communication=8.0)


def scaled(times: dict[int, Times], steps: int) -> dict[int, Times]:
    return {
        rank: Times(*(steps * value for value in (t.compute, t.data, t.gc, t.communication)))
        for rank, t in times.items()
    }


def test_a_slow_rank_is_named_once_after_two_windows_and_again_after_it_was_fast() -> None:
    noticed, slow = Noticed(), EVEN | {4: Times(compute=0.6, data=0.02)}

    def named(times: dict[int, Times]) -> int | None:
        found = noticed.add(scaled(times, 10), 10, STAGES)
        assert found is None or found.times.compute == pytest.approx(0.6)
        return None if found is None else found.rank

    assert [named(slow) for _ in range(8)] == [None, None, None, 4, None, None, None, None]
    assert [named(EVEN) for _ in range(4)] == [None] * 4
    assert [named(slow) for _ in range(4)] == [None, None, None, 4]


def test_noise_and_changing_ranks_are_not_named() -> None:
    noticed = Noticed()
    for rank in (0, 1, 2, 0, 1, 2):
        assert noticed.add(scaled(EVEN | {rank: Times(compute=0.3)}, 16), 16, STAGES) is None
    tiny = {rank: Times(compute=0.001 * (1 + rank)) for rank in range(3)}
    assert all(noticed.add(scaled(tiny, 16), 16, STAGES) is None for _ in range(4))
