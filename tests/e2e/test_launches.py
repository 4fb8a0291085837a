"""A run says at once that it starts, and ends with status 0, every time: no process dies while it leaves."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.launching import BERT_PROGRAM, PROGRAM, ROOT, START, environment, needs_proc, small_run, under_torchrun
from tests.patience import patience


@pytest.mark.parametrize("program", [PROGRAM, BERT_PROGRAM, ROOT / "tools" / "quickstart.py"])
def test_the_first_line_comes_within_a_second(program: Path) -> None:
    started = time.monotonic()
    with subprocess.Popen([sys.executable, program], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line, elapsed = process.stdout.readline(), time.monotonic() - started
        process.kill()
    assert line in ("starting 1 process: reading flags and files\n", "quick start: looking for GPUs\n")
    assert elapsed < patience(1)


@needs_proc
def test_the_first_rank_says_how_far_the_start_has_come(tmp_path: Path) -> None:
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *small_run(tmp_path / "out", dp=2, train_iters=1)) as job:
        assert job.ends(START)[0] == 0
        said = [line for line in job.said("stdout").splitlines() if line.startswith("starting ")]
    assert [re.sub(r" +\d+\.\d s", " T s", line) for line in said] == [
        "starting 2 processes: reading flags and files",
        "starting T s | loading torch",
        "starting T s | joining 2 ranks and comparing them",
        "starting T s | preparing data and model",
    ]


@pytest.mark.slow
def test_finished_runs_end_with_status_0(tmp_path: Path) -> None:
    """Of processes that a launcher has started cold. Status 0 alone could hide a death that it does not see."""
    for number in range(10):
        flags = small_run(tmp_path / f"out{number}", tp=2, pp=2, train_iters=3, global_batch_size=8)
        with under_torchrun(tmp_path / f"logs{number}", 4, PROGRAM, *flags, cold=True) as job:
            status, _ = job.ends(START)
            said = job.said("stdout") + job.said()
        assert status == 0 and "terminate" not in said and "done: 3 steps" in said, said
