"""Ranks that never join the run are named by those that wait for them, on one node and across nodes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hanging import HANG
from tests.e2e.launching import PROGRAM, START, TORCHRUN, by_hand, free_port, needs_proc, small_run, started, words
from tests.patience import patience, scaled_minutes, until
from tests.warm import Started

pytestmark = needs_proc
HANGING = Path(__file__).with_name("hanging.py")
MINUTES = 0.004


@functools.cache
def hang_minutes(minutes: float) -> float:
    """--hang-timeout-minutes: of all ranks the same, although the load of the machine changes between their starts."""
    return scaled_minutes(minutes)


def rank_of(
    tmp_path: Path, rank: int, port: int, *, minutes: float = MINUTES, **variables: object
) -> contextlib.AbstractContextManager[Started]:
    """A rank of two, started by hand."""
    flags = small_run(tmp_path / "out", dp=2, hang_timeout_minutes=hang_minutes(minutes))
    script = HANGING if HANG in variables else PROGRAM
    return started(script, tmp_path / f"{rank}.err", *flags, **{**by_hand(rank, port), **variables})


@contextlib.contextmanager
def both_ranks(
    tmp_path: Path, *, at: str, rank: int, fault: str = "kill", minutes: float = 5.0
) -> Iterator[tuple[Started, Started]]:
    """Both ranks of two, one of which has this fault at this point."""
    plan: dict[str, Any] = {HANG: json.dumps({"rank": rank, "at": at, "call": 1, "fault": fault})}
    port = free_port()
    with (
        rank_of(tmp_path, 0, port, minutes=minutes, **plan) as one,
        rank_of(tmp_path, 1, port, minutes=minutes, **plan) as other,
    ):
        yield one, other


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    with rank_of(tmp_path, 0, free_port()) as one:
        assert one.wait(patience(START)) == 124
    said = (tmp_path / "0.err").read_text()
    assert said.startswith("megacore: hang at step 0: probably rank 1 (pp 0, dp 1, tp 0) blocks the run"), said
    assert "it has written nothing: never started, out of reach, or not watched" in said
    assert re.search(r"^  rank 0 +0 .* (connection to the master|meeting of the ranks)", said, re.MULTILINE), said


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_imports_is_named_and_all_end_as_hung(tmp_path: Path) -> None:
    with both_ranks(tmp_path, at="import", rank=1, fault="sleep", minutes=MINUTES) as ranks:
        assert [rank.wait(patience(3 * START)) for rank in ranks] == [124, 124]
    said = (tmp_path / "0.err").read_text() + (tmp_path / "1.err").read_text()
    assert re.match(r"megacore: hang at step 0: .*rank 1 \(pp 0, dp 1, tp 0; pid \d+ on \S+\) block", said), said


def test_a_rank_that_dies_in_its_imports_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with both_ranks(tmp_path, at="import", rank=1) as (one, other):
        assert other.wait(patience(START)) == -signal.SIGKILL
        assert one.wait(patience(START)) == -signal.SIGTERM
    said = (tmp_path / "0.err").read_text() + (tmp_path / "1.err").read_text()
    assert re.match(r"megacore: rank 1 \(pid \d+\) on \S+ has died in the phase: import of libraries; ", said), said
    assert said.count("megacore: ") == 1


def test_a_rank_that_dies_while_the_ranks_meet_is_named_and_not_the_one_that_notices(tmp_path: Path) -> None:
    with both_ranks(tmp_path, at="start", rank=0) as (one, other):
        assert one.wait(patience(START)) == -signal.SIGKILL
        assert other.wait(patience(START)) != 0
    said = (tmp_path / "1.err").read_text() + (tmp_path / "0.err").read_text()
    assert re.search(r"^megacore: rank 0 \(pid \d+\) on \S+ has died in the phase: ", said, re.MULTILINE), said
    assert said.count("megacore: ") == 1
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_cannot_reach_the_master_is_named(tmp_path: Path) -> None:
    """On two nodes: rank 1 asks where nobody answers."""
    node = {"LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    with (
        rank_of(tmp_path, 1, free_port(), GROUP_RANK=1, **node),
        rank_of(tmp_path, 0, free_port(), GROUP_RANK=0, **node) as one,
    ):
        assert one.wait(patience(3 * START)) == 124
    said = (tmp_path / "0.err").read_text()
    assert said.startswith("megacore: hang at step 0: probably rank 1 (pp 0, dp 1, tp 0) blocks the run"), said


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_on_another_node_is_named(tmp_path: Path, victim: int) -> None:
    """Two torchrun agents on one machine: their watchers share no directory, only the launcher's store."""
    fault = {HANG: json.dumps({"rank": victim, "at": "data", "call": 9, "fault": "sleep"})}
    given = {"dp": 2, "train_iters": 1_000_000, "hang_timeout_minutes": scaled_minutes(0.05)}
    agents = words(nnodes=2, nproc_per_node=1, master_addr="127.0.0.1", master_port=free_port())
    with contextlib.ExitStack() as nodes:
        launchers = []
        for rank in range(2):
            flags = [*agents, *words(node_rank=rank), HANGING, *small_run(tmp_path / "out", **given)]
            launchers.append(nodes.enter_context(started(TORCHRUN, tmp_path / f"{rank}.err", *flags, **fault)))
        assert [launcher.wait(patience(3 * START)) for launcher in launchers] == [1, 1]
    said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    who = rf"megacore: hang at step \d+: rank {victim} \(pp 0, dp {victim}, tp 0; pid \d+ on \S+\) blocks the run"
    assert re.search(who, said[0]), said[0]
    assert f"rank {victim}    data (next batch)" in said[0]
    assert ("not asked: only those of the first node" in said[0]) == (victim == 1)
    report = json.loads(next((tmp_path / "out").glob("hang-*.json")).read_text())
    assert (report["verdict"]["ranks"], report["verdict"]["is_certain"]) == ([victim], True)
    until(lambda: not alive(report), 5, "ranks are left")


def alive(report: dict[str, object]) -> list[int]:
    """The processes of a report that still run."""
    pids = [rank["identity"]["pid"] for rank in report["ranks"]]  # type: ignore[attr-defined]
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
