"""A rank's ledger as another process reads it, also after the rank was killed; and how long a run may stand still."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from megacore.files import take_lock
from megacore.job_directory import make
from megacore.observe.sinks import END_SECONDS
from megacore.parallel.heartbeat import Channel, Current, Phase, code_of, phase, post, section
from megacore.parallel.random import RandomStreams
from megacore.parallel.turns import Turns
from megacore.watch import nodes, start
from megacore.watch.blame import Seen, Verdict, blame
from megacore.watch.budget import GRACE_SECONDS, TIMES, limit, still_seconds
from megacore.watch.for_training import WATCHDOG
from megacore.watch.ledger import Flag, Ledger
from megacore.watch.node import Node, leaving_file, remove
from megacore.watch.nodes import Nodes
from megacore.watch.processes import born, end, state_of
from megacore.watch.record import LedgerFile, Record
from megacore.watch.report import hang_report, main_stack, phase_in_words
from megacore.watch.stragglers import Noticed, Times, slowest
from megacore.watch.watcher import Watcher
from tests.patience import patience
from tests.unit.packaging_builds import ROOT
from tests.unit.watch_records import identity, seen

RANKS, OTHERS = (0, 1, 2, 3), (1, 3)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of this process, as rank 1 of 4."""
    made = Ledger(tmp_path, identity(1, 4, pid=os.getpid(), degrees={"pp": 1, "dp": 2, "tp": 2}))
    monkeypatch.setattr(Current, "heartbeat", made)
    return made


def read(ledger: Ledger) -> Record:
    return LedgerFile(ledger.directory / "rank-1.ledger").record()


def test_phases_nest_and_end(ledger: Ledger) -> None:
    assert read(ledger).phase is Phase.IMPORT
    ledger.begin_step(5)
    with phase(Phase.FORWARD, stage=0, microbatch=70_000):
        inside = read(ledger)
        with post(Phase.ALL_REDUCE, RANKS, 4096):
            communicating = read(ledger)
        after = read(ledger)
    assert (inside.phase, inside.stage, inside.microbatch, inside.step) == (Phase.FORWARD, 0, 70_000, 5)
    assert (inside.section, inside.channel, inside.awaited) == (Phase.FIRST_STEP, None, 0)
    assert communicating.phase is Phase.ALL_REDUCE
    assert (communicating.channel, communicating.awaited, communicating.nbytes) == (Channel(RANKS), 1, 4096)
    assert (after.phase, after.posted) == (Phase.FORWARD, {Channel(RANKS): 1})
    with section(Phase.SAVE):
        assert read(ledger).section is Phase.SAVE
    assert read(ledger).section is Phase.FIRST_STEP
    ledger.end_step()
    assert read(ledger).section is Phase.STEP
    assert phase_in_words(read(ledger)) == "between steps"
    assert Record.from_json(json.loads(json.dumps(communicating.to_json()))) == communicating


def test_computations_that_take_turns_are_each_in_their_own_phase(ledger: Ledger) -> None:
    turns, found = Turns(RandomStreams(0, torch.device("cpu"))), []

    def compute(kind: Phase) -> None:
        with phase(kind):
            for _ in range(2):
                turns.pause()
                found.append((kind, read(ledger).phase))

    with section(Phase.STEP):
        turns.begin(partial(compute, Phase.BACKWARD))
        compute(Phase.FORWARD)
        turns.finish()
        assert read(ledger).phase is Phase.STEP
    assert found[0] == (Phase.FORWARD,) * 2 and found[1] == (Phase.BACKWARD,) * 2 and all(a is b for a, b in found)


def test_a_ledger_without_room_is_refused_and_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to a page that the file system has no room for would kill the process."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Ledger(tmp_path, identity(1, 4))
    assert list(tmp_path.iterdir()) == []


def test_operations_are_counted_by_channel_and_waited_for_later(ledger: Ledger) -> None:
    first, second = post(Phase.REDUCE_SCATTER, RANKS, 8), post(Phase.ALL_GATHER, RANKS, 16)
    post(Phase.SEND, OTHERS, 4)
    post(Phase.ALL_REDUCE, OTHERS, 4)  # a group of two is not the messages between them
    with second:
        assert (read(ledger).phase, read(ledger).awaited, read(ledger).nbytes) == (Phase.ALL_GATHER, 2, 16)
    with first:
        assert (read(ledger).phase, read(ledger).awaited, read(ledger).nbytes) == (Phase.REDUCE_SCATTER, 1, 8)
    posted = {Channel(RANKS): 2, Channel(OTHERS, is_message=True): 1, Channel(OTHERS): 1}
    assert read(ledger).posted == posted


def test_groups_of_ten_thousand_ranks_have_room(ledger: Ledger) -> None:
    world = tuple(range(16_384))
    groups = [world, *(tuple(range(first, 16_384, 8)) for first in range(8)), (5, 1, 2, 9, 3), (7, 7)]
    for ranks in groups:
        post(Phase.ALL_REDUCE, ranks, 8)
    assert read(ledger).posted == {Channel(ranks): 1 for ranks in groups}


def take_step(ledger: Ledger, number: int, sizes: list[int]) -> int:
    """A step with all-reduces of these sizes; returns the deviation that is noted before it ends."""
    ledger.begin_step(number)
    for size in sizes:
        post(Phase.ALL_REDUCE, RANKS, size)
    noted = read(ledger).deviation
    ledger.end_step()
    return noted


@pytest.mark.parametrize("changed", [[8, 4], [8, 16, 5], [16, 8, 4], [8, 16, 4, 4], [8, 16]])
def test_another_order_of_operations_is_noted_at_once(ledger: Ledger, changed: list[int]) -> None:
    """One that is left unfinished when the step ends."""
    usual = [8, 16, 4]
    assert [take_step(ledger, number, usual) for number in (1, 2, 3)] == [0, 0, 0]
    assert take_step(ledger, 4, changed) == (0 if changed == usual[:2] else 4)
    assert take_step(ledger, 5, usual) == 4  # remembered until a whole step is usual again
    take_step(ledger, 6, usual)
    assert read(ledger).deviation == 0


def test_a_step_that_an_error_breaks_off_is_not_compared(ledger: Ledger) -> None:
    """Every rank that fails because another one has died would seem to be the cause."""
    for number in (1, 2):
        take_step(ledger, number, [8, 16])
    ledger.begin_step(3)
    post(Phase.ALL_REDUCE, RANKS, 8)
    ledger.leave_step()
    assert (read(ledger).deviation, read(ledger).section, ledger.in_step) == (0, Phase.STEP, False)


WRITER = """
import os, sys, time
from pathlib import Path
from megacore.parallel.heartbeat import Phase, code_of
from megacore.watch.ledger import Ledger
from tests.unit.watch_records import identity
Ledger(Path(sys.argv[1]), identity(1, 4, pid=os.getpid())).enter(code_of(Phase.BACKWARD, stage=3, microbatch=2))
print(flush=True)
time.sleep(60)
"""


def test_a_ledger_is_readable_while_its_process_is_stopped_and_after_it_was_killed(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", WRITER, str(tmp_path)], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        file, since = LedgerFile(tmp_path / "rank-1.ledger"), born(writer.pid)
        assert state_of(writer.pid, since) == "running"
        writer.send_signal(signal.SIGSTOP)
        os.waitpid(writer.pid, os.WUNTRACED)
        assert state_of(writer.pid, since) == "stopped"
        assert end([writer.pid], patience(20)) == []  # killed at once: it could not answer
        writer.wait(patience(5))
        assert state_of(writer.pid, since) == "gone"
        assert (file.record().phase, file.record().stage, file.record().microbatch) == (Phase.BACKWARD, 3, 2)


@contextmanager
def sleeper() -> Iterator[dict[str, int]]:
    """A process that lives until here: its number and its birth."""
    time.sleep(0.02)  # the clock of starts has ticks of 10 ms
    with subprocess.Popen(["sleep", "60"]) as process:
        yield {"pid": process.pid, "born": born(process.pid)}
        process.kill()


def states(node: Node) -> list[tuple[int, str]]:
    return [(one.rank, one.state) for one in node.look()]


def test_a_rank_that_died_before_it_was_looked_at_is_seen_and_one_of_an_earlier_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own time proves nothing: a rank may write its ledger before another one of the run has started."""
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    ranks = [Ledger(tmp_path, identity(rank, 4, pid=dead.pid)) for rank in (1, 2)]
    with sleeper() as alive:
        Ledger(tmp_path, identity(0, 4, **alive))
        time.sleep(0.02)
        ranks[0].enter(code_of(Phase.BUILD))
        node = Node(tmp_path)
        assert states(node) == [(0, "running"), (1, "gone")]
        monkeypatch.setattr(Current, "heartbeat", Ledger(tmp_path, identity(3, 4, **alive)))
        said = f"rank 1 (pid {dead.pid}) on host has died in the phase: build of the model"
        assert WATCHDOG.died_silently(0.0) == said
    assert Node(tmp_path).look() == []
    assert states(node) == [(0, "gone"), (1, "gone")]


def test_a_new_run_in_the_directory_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """The watcher of the run before has its ledgers open, and must not take the dead of that run for those of this."""
    with sleeper() as before:
        for rank in (0, 1):
            Ledger(tmp_path, identity(rank, 2, **before))
        node = Node(tmp_path)
        assert states(node) == [(0, "running"), (1, "running")]
    assert states(node) == [(0, "gone"), (1, "gone")]
    with sleeper() as living:
        Ledger(tmp_path, identity(0, 2, **living))
        (one,) = node.look()
        assert (one.rank, one.state, one.record.identity.pid) == (0, "running", living["pid"])


# ---- how long a run may stand still


def holder(rank: int = 0) -> Verdict:
    return Verdict(kind="holds up", ranks=(rank,), is_certain=True)


def ending(section: Phase, rank: int = 0, terminating: float | None = 3.0, **changes: Any) -> Seen:
    """A rank that was told to end, in a run that reports a hang after five minutes."""
    return seen(rank, 2, section=section, terminating=terminating, about={"hang_timeout": 300.0}, **changes)


SAVING, STEPPING = seen(0, 2, section=Phase.SAVE), seen(1, 2)
SHORTENED = (Phase.SINK, Phase.CHECK, Phase.LOAD, Phase.INDEX, Phase.START, Phase.STEP)
CIRCLE = Verdict(kind="cycle", ranks=(0, 1))
SINK_BESIDE_SAVE = [ending(Phase.SINK), ending(Phase.SAVE, rank=1, terminating=None)]
# What ranks do, the verdict on them, and the seconds that they may stand still. A phase has its own budget; with a
# timeout of 10 s, a save has 6 times as long.
LIMITS: list[tuple[list[Seen], Verdict, float]] = [
    *(([seen(0, 1, section=where)], holder(), 10.0 * times) for where, times in TIMES.items()),
    ([SAVING], Verdict(kind="stopped", ranks=(0,), is_certain=True), 10.0),
    ([seen(0, 1, median_step=60.0)], holder(), 600.0),  # long steps have a multiple of their median
    ([seen(0, 1, median_step=3.0, section=Phase.SAVE)], holder(), 60.0),
    ([SAVING, STEPPING], holder(1), 10.0),  # the culprit's phase decides
    ([SAVING, STEPPING], holder(0), 60.0),
    ([SAVING, STEPPING], CIRCLE, 60.0),  # and the slowest one where there is none
    # A signal to end shortens the patience, but not in a save.
    *(([ending(where)], holder(), GRACE_SECONDS) for where in SHORTENED),
    *(([ending(where)], holder(), TIMES[where] * 300.0) for where in (Phase.SAVE, Phase.EVALUATE, Phase.FIRST_STEP)),
    ([ending(Phase.STEP, median_step=20.0)], holder(), 40.0),
    ([ending(Phase.EXIT)], holder(), END_SECONDS + 15.0),
    (SINK_BESIDE_SAVE, CIRCLE, 1800.0),
    (SINK_BESIDE_SAVE, holder(0), GRACE_SECONDS),
]


def test_the_budget_of_what_ranks_do() -> None:
    for ranks, verdict, seconds in LIMITS:
        assert limit(ranks, verdict).seconds == seconds, (ranks, verdict)


def test_a_run_stands_still_as_long_as_its_last_rank_and_not_while_all_are_stopped() -> None:
    assert still_seconds([seen(0, 2, age=8.0), seen(1, 2, age=3.0)]) == 3.0
    assert still_seconds([seen(0, 2, age=8.0), seen(1, 2, age=3.0, phase=Phase.DONE)]) == 8.0
    assert still_seconds([seen(rank, 2, state="stopped") for rank in range(2)]) == 0.0


# ---- words


DUMP = """Thread 0x01 (most recent call first):
  File "peers.py", line 1 in watch

Thread 0x02 (most recent call first):
  File "loader.py", line 5 in read
  File "trainer.py", line 9 in run
"""


def test_the_report_names_the_culprit_and_shows_its_main_thread() -> None:
    assert main_stack(DUMP) == ['File "loader.py", line 5 in read', 'File "trainer.py", line 9 in run']
    assert main_stack("") == []
    ranks = [seen(0, 2, phase=Phase.BARRIER), seen(1, 2, phase=Phase.DATA)]
    verdict = Verdict(kind="holds up", ranks=(1,), is_certain=True, why="rank 0 waits for it")
    about: dict[str, Any] = {"seconds": 20.0, "allowed": "10 s: 10 median steps", "world_size": 2}
    said = hang_report(ranks, verdict, stacks={1: DUMP}, **about)
    assert said.startswith("hang at step 7: rank 1 (pp 0, dp 1, tp 0; pid 1001 on host) blocks the run\n")
    assert "\n  limit     10 s: 10 median steps\n" in said
    assert 'File "loader.py", line 5 in read' in said
    assert max(map(len, said.splitlines())) <= 120
    assert "did not answer" in hang_report(ranks, verdict, stacks={1: ""}, **about)
    elsewhere = hang_report(ranks, verdict, stacks={0: DUMP}, **about)
    assert "not asked: only those of the first node are collected, and this rank is on host" in elsewhere
    assert "did not answer" not in elsewhere


# ---- directories of ledgers ------------------------------------------------------------------------------------------

ME = {"pid": os.getpid(), "born": born(os.getpid())}


def test_a_watcher_leaves_unless_a_rank_of_a_new_run_is_there(tmp_path: Path) -> None:
    watcher = Watcher(Node(tmp_path), sys.stderr)
    watcher.run()  # returns at once: whoever has started it is gone
    assert leaving_file(tmp_path).exists()  # a rank that comes now waits until the directory is gone
    Ledger(tmp_path, identity(0, 2, **ME))
    assert not watcher.leaves()
    assert not leaving_file(tmp_path).exists()
    assert [one.rank for one in watcher.node.look()] == [0]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_comes_while_a_watcher_leaves_has_a_ledger_and_a_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(start.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(start.faulthandler, "register", lambda *_, **__: None)
    monkeypatch.setattr(Current, "heartbeat", None)
    directory = tmp_path / "ledgers"
    make(directory)
    lock = os.open(directory / start.LOCK, os.O_RDWR | os.O_CREAT)
    take_lock(lock)  # as the watcher of the run before
    leaving_file(directory).touch()

    def decide() -> None:
        time.sleep(0.1)
        if leaves:
            remove(directory)
            os.close(lock)
        else:
            leaving_file(directory).unlink()

    watcher = threading.Thread(target=decide)
    watcher.start()
    begun = [start.begin_in(directory, identity(0, 2, **ME))]
    watcher.join()
    if leaves:
        begun.append(start.begin_in(directory, identity(0, 2, **ME)))
    assert begun == ([False, True] if leaves else [True])
    assert [one.rank for one in Node(directory).look()] == [0]
    assert len(started) == leaves
    assert [path.name for path in tmp_path.iterdir()] == ["ledgers"]


# ---- the verdict -----------------------------------------------------------------------------------------------------

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
    "who has posted nothing yet": ([in_collective(0, PAIR, awaited=1), seen(1, 2)], "holds up 1", ""),
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
    first.store.check(["anything"])  # a store answers after it has taken what was set before
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

    second.store = Cut()
    began = time.perf_counter()
    assert second.verdict() is None
    assert second.verdict() is None
    second.publish([seen(1, 2)], 9.0, urgent=True)
    assert time.perf_counter() - began < patience(2)
    back.set()
