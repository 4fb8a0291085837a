"""What the watchers of two nodes learn of each other through the launcher's store, which is all that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megacore.watch import nodes
from megacore.watch.blame import blame
from megacore.watch.ledger import Channel, Phase
from megacore.watch.nodes import Nodes
from tests.patience import patience
from tests.unit.watch_records import seen

WORLD = Channel((0, 1))


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
    sleeping = seen(1, 2, phase=Phase.DATA, posted={WORLD: 4})
    second.publish([sleeping], 3.0, urgent=False)
    assert first.others() is None  # it may yet move
    second.publish([sleeping], 9.0, urgent=True)
    others = first.others()
    assert others is not None
    ((ranks, still),) = others
    assert ranks == [sleeping]
    assert 9.0 <= still < 9.5
    waiting = seen(0, 2, phase=Phase.ALL_REDUCE, channel=WORLD, awaited=5, posted={WORLD: 5})
    verdict = blame([waiting, *ranks], 2)
    assert (verdict.kind, verdict.ranks, verdict.is_certain) == ("holds up", (1,), True)
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: None)
    assert second.verdict() is None
    first.pronounce("megacore: hang at step 7")
    assert second.verdict() == "megacore: hang at step 7"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test changes."""
    found = [1000.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: found[0])
    return found


def test_a_node_that_publishes_no_more_is_left_out_as_out_of_reach(pair: tuple[Nodes, Nodes], now: list[float]) -> None:
    first, second = pair
    second.publish([seen(1, 2)], 0.0, urgent=False)
    assert first.others() is None
    now[0] += 40.0
    assert first.others() == []
    assert blame([seen(0, 2)], 2).ranks == (1,)


def test_a_node_that_the_first_one_no_longer_answers_decides_for_itself(
    pair: tuple[Nodes, Nodes], now: list[float]
) -> None:
    first, second = pair
    first.publish([seen(0, 2)], 0.0, urgent=False)
    assert second.others() is None  # the first node is to decide
    now[0] += 29.0
    assert second.others() is None
    first.publish([seen(0, 2)], 0.0, urgent=False)
    assert second.others() is None
    now[0] += 31.0
    assert second.others() == []
    first.publish([seen(0, 2)], 0.0, urgent=False)
    assert second.others() is None  # it is back


def test_a_store_that_does_not_answer_holds_nothing_up(
    pair: tuple[Nodes, Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for an answer over a connection that is cut for as long as TCP does, which is many minutes."""
    _, second = pair
    monkeypatch.setattr(nodes, "_PATIENCE", timedelta(seconds=0.1))
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
