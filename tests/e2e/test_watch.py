"""A run that hangs is reported with the rank that holds it up, and every process of it ends; a slow one goes on."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hangs import healthy, trials
from megacore.job_directory import job_directories
from megacore.watch.record import LedgerFile
from tests.e2e.hanging import HANG
from tests.e2e.launching import (
    END,
    PROGRAM,
    START,
    TORCHRUN,
    Job,
    alone,
    by_hand,
    free_port,
    losses,
    needs_proc,
    run_warm,
    small_run,
    started,
    under_torchrun,
    words,
)
from tests.patience import patience, scaled, scaled_minutes, until
from tests.warm import Started

pytestmark = needs_proc
HANGING = Path(__file__).with_name("hanging.py")
WHERE = PROGRAM.parent / "tools" / "where.py"
MINUTES = 0.04  # on a quiet machine; a busy one may need as long for a healthy step


def flags(output: Path, **changes: Any) -> list[str]:
    endless = {"train_iters": 1_000_000, "global_batch_size": 4, "hang_timeout_minutes": scaled_minutes(MINUTES)}
    return small_run(output, **{**endless, **changes})


def watchers(marker: str) -> list[int]:
    """The watchers of runs that were started with this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_watcher = b"megacore.watch.watcher" in (process / "cmdline").read_bytes()
            if is_watcher and marker.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def report_in(output: Path) -> dict[str, Any]:
    """What a run has written of its hang."""
    report: dict[str, Any] = json.loads(next(output.glob("hang-*.json")).read_text())
    return report


def ledgers(output: Path) -> list[Path]:
    """The ledgers of runs that write into this directory."""
    found = []
    for path in (path for directory in job_directories("watch") for path in directory.glob("*.ledger")):
        with contextlib.suppress(OSError, ValueError):
            if LedgerFile(path).identity.output_dir.startswith(str(output)):
                found.append(path)
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No watcher and no ledger outlives a run."""
    monkeypatch.setenv("WATCH_TEST", str(tmp_path))
    yield
    until(lambda: not watchers(str(tmp_path)), 5, "a watcher is left")
    until(lambda: not ledgers(tmp_path), 5, "ledgers are left")


def reported(job: Job) -> str:
    """What is said of the hang, once all processes have ended."""
    until(lambda: "megacore: " in job.said(), START, "no report")
    said_at = time.monotonic()
    status, launcher = job.ends(END)
    assert time.monotonic() - said_at < patience(END)
    assert status == 1
    assert "hang at step" in launcher
    said = job.said()
    assert said.count("megacore: ") == 1, said
    assert "Traceback" not in said, said
    return said


def test_a_stopped_rank_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    """While it hangs, tools/where.py shows where every rank is."""
    minutes = scaled_minutes(MINUTES)
    given = flags(tmp_path / "out", tp=2, save_interval=5, hang_timeout_minutes=minutes)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *given) as job:
        job.wait_for_step(6)
        victim = job.pid_of(1)
        for words in ([tmp_path / "out"], ["--pid", victim]):
            shown = run_warm(WHERE, *words, timeout=START)
            assert "out: 2 of 2 ranks, on " in shown.stdout, shown.stderr
            assert "ranks " in shown.stdout.splitlines()[1]
        os.kill(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: "megacore: " in job.said(), 60 * MINUTES + 2, "no report in time")
        assert time.monotonic() - stopped > 60 * minutes - 0.5
        said = reported(job)
    who = rf"rank 1 \(pp 0, dp 0, tp 1; pid {victim} on \S+\) blocks the run"
    assert re.match(rf"megacore: hang at step \d+: {who}", said), said
    assert "did not answer" in said
    assert max(map(len, said.splitlines())) <= 120 + len(str(tmp_path))
    report = report_in(tmp_path / "out")
    assert (report["verdict"]["ranks"], report["verdict"]["is_certain"], report["exit_status"]) == ([1], True, 124)
    assert [rank["state"] for rank in report["ranks"]] == ["running", "stopped"]
    assert 'File "' in report["ranks"][0]["stack"]
    done = alone(*flags(tmp_path / "out", load="auto", train_iters=report["step"] + 1), timeout=START)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "plan", "words"),
    [
        ({"dp": 2}, {"rank": 1, "at": "data", "call": 31, "fault": "sleep"}, ["data (next batch)", "hanging.py"]),
        ({"dp": 2}, {"rank": 1, "at": "posted", "call": 31, "fault": "spin"}, ["all-reduce", "hanging.py"]),
        (
            {"pp": 2},
            {"rank": 1, "at": "forward", "call": 31, "fault": "lock"},
            ["forward of microbatch", "hold_the_interpreter"],
        ),
        # The sum over pp. Until the next one the stages exchange only messages: they wait for each other.
        (
            {"dp": 2, "pp": 2, "log_interval": 1000},
            {"rank": 0, "at": "collective", "call": 16, "fault": "skip-last"},
            ["left the order"],
        ),
    ],
    ids=["sleeps", "spins", "holds the interpreter", "leaves a collective out"],
)
def test_what_a_rank_hangs_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], plan: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.setenv(HANG, json.dumps(plan))
    ranks = layout.get("dp", 1) * layout.get("pp", 1)
    with under_torchrun(tmp_path / "logs", ranks, HANGING, *flags(tmp_path / "out", **layout)) as job:
        said = reported(job)
    who = rf"megacore: hang at step \d+: (probably )?rank {plan['rank']} \(.*\) blocks the run\n"
    assert re.match(who, said), said
    assert all(word in said for word in words), said
    verdict = report_in(tmp_path / "out")["verdict"]
    if plan["fault"] == "skip-last":
        assert (verdict["kind"], verdict["ranks"], verdict["is_certain"]) == ("deviates", [0], True)


@pytest.mark.slow
def test_a_rank_that_leaves_a_collective_out_is_named_where_gloo_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out the sum over dp. The next operation of the rank on that group is smaller than what it receives."""
    monkeypatch.setenv(HANG, json.dumps({"rank": 0, "at": "collective", "call": 16, "fault": "skip"}))
    with under_torchrun(tmp_path / "logs", 4, HANGING, *flags(tmp_path / "out", dp=2, pp=2, log_interval=1000)) as job:
        until(lambda: "megacore: " in job.said(), START, "no report")
        assert job.ends(END)[0] == 1
        said = job.said()
    who = r"rank 0 \(pp 0, dp 0, tp 0; pid \d+ on \S+\) has died; stopping the others"
    why = r"probably because of rank 0 \(pp 0, dp 0, tp 0\), which left the order in which it communicates in step 16"
    assert re.search(rf"^megacore: {who}; {why}$", said, re.MULTILINE), said
    assert said.count("megacore: ") == 1, said
    assert not list((tmp_path / "out").glob("hang-*.json"))


def test_slow_ranks_saves_and_sinks_are_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW", str(scaled(0.5) / 4))
    monkeypatch.setenv(HANG, json.dumps({"rank": 1, "at": "save", "call": 1, "fault": "slow"}))
    given = flags(tmp_path / "out", dp=2, train_iters=6, save_interval=2, hang_timeout_minutes=scaled_minutes(0.01))
    with under_torchrun(tmp_path / "logs", 2, HANGING, *given) as job:
        status, _ = job.ends(START)
    assert (status, job.said().strip()) == (0, "")


def test_signals_save_and_continue_or_save_and_end(tmp_path: Path) -> None:
    given = flags(tmp_path / "out", dp=2, hang_timeout_minutes=0)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *given) as job:
        job.wait_for_step(2)
        subprocess.run(["pkill", "-USR1", "-P", str(job.torchrun.pid)], check=True)  # as the docs say: its ranks
        until(lambda: "saved" in job.said("stdout"), START, "no checkpoint")
        saved = int(re.findall(r"step (\d+)/\d+ \| saved", job.said("stdout"))[0])
        job.wait_for_step(saved + 2)
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
            os.kill(job.pid_of(0), number)
        assert job.ends(START)[0] == 0
        said, errors = job.said("stdout"), job.said()
    (step,) = re.findall(r"^stopped by SIG(?:USR2|TERM): (\d+) of 1000000 steps", said, re.MULTILINE)
    assert (tmp_path / "out" / f"step_{int(step):08d}").exists() and max(losses(tmp_path / "out")) == int(step)
    assert len(re.findall(r"\| saved", said)) == 2
    assert errors == ""


def test_the_batch_script_of_the_docs_passes_a_signal_on_and_ends_as_the_launcher_does(tmp_path: Path) -> None:
    docs = (PROGRAM.parent / "docs" / "guides" / "watching.md").read_text()
    (script,) = [block for block in re.findall(r"```bash\n(.*?)```", docs, re.DOTALL) if "trap" in block]
    rank = "trap 'echo saved; exit' USR2; echo training; while :; do sleep 0.05; done"
    launcher = tmp_path / "torchrun"
    launcher.write_text(f'#!/bin/sh\nsh -c "{rank}" &\nwait $!\nsleep 0.1\nexit 3\n')
    launcher.chmod(0o755)
    said, environment = tmp_path / "said", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with said.open("w") as file, subprocess.Popen(["bash", "-c", script], env=environment, stdout=file) as job:
        until(lambda: said.read_text() == "training\n", START, "the job has not begun")
        job.send_signal(signal.SIGUSR2)
        assert job.wait(patience(10)) == 3
    assert said.read_text() == "training\nsaved\n"


@pytest.mark.slow
def test_a_signal_ends_a_run_with_a_stopped_rank_in_its_grace(tmp_path: Path) -> None:
    given = flags(tmp_path / "out", dp=2, hang_timeout_minutes=10, save_interval=1)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *given) as job:
        job.wait_for_step(3)
        os.kill(job.pid_of(1), signal.SIGSTOP)
        job.torchrun.send_signal(signal.SIGTERM)
        job.ends(25.0)
        said = job.said()
    assert re.match(r"megacore: hang at step \d+: rank 1 ", said), said
    assert list((tmp_path / "out").glob("step_*"))


@pytest.mark.slow
def test_one_process_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HANG, json.dumps({"rank": 0, "at": "backward", "call": 9, "fault": "sleep"}))
    monkeypatch.setenv("RANK", "0")
    done = alone(*flags(tmp_path / "out"), program=HANGING, timeout=START)
    assert done.returncode == 124
    assert "rank 0 (pp 0, dp 0, tp 0; pid" in done.stderr
    assert "backward of microbatch" in done.stderr


@pytest.mark.slow
def test_random_hangs_are_blamed_on_the_right_rank_and_never_surely_on_another() -> None:
    """Ten of the trials of benchmarks/hangs.py, which demands 96%: all of ten, where fifty may have two misses."""
    assert trials(10, seed=15, minutes=0.05, large=0.1) == 0


@pytest.mark.slow
def test_slow_steps_saves_evaluations_and_logs_are_no_false_alarm() -> None:
    assert healthy(200, minutes=0.05) == 0


# ---- at the start ----------------------------------------------------------------------------------------------------

START_MINUTES = 0.004


@functools.cache
def hang_minutes(minutes: float) -> float:
    """--hang-timeout-minutes: of all ranks the same, although the load of the machine changes between their starts."""
    return scaled_minutes(minutes)


def rank_of(
    tmp_path: Path, rank: int, port: int, *, minutes: float = START_MINUTES, **variables: object
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
    with both_ranks(tmp_path, at="import", rank=1, fault="sleep", minutes=START_MINUTES) as ranks:
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
