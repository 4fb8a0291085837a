"""A run says at once that it starts, loads no more than it needs, and ends with status 0, every time: no process dies
while it leaves. One without a single update ends with status 4."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.launching import (
    BERT_PROGRAM,
    PROGRAM,
    ROOT,
    START,
    alone,
    environment,
    needs_proc,
    run_cold,
    small_run,
    under_torchrun,
)
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


def test_a_run_without_one_update_stops_with_status_4(tmp_path: Path) -> None:
    done = alone(*small_run(tmp_path, init_method_std=1e30, train_iters=2, seq_length=32, device="cpu"), timeout=60)
    assert done.returncode == 4, done.stderr
    assert "megacore: stopped: each of 2 steps was skipped" in done.stderr and "done" not in done.stdout


# ---- what a run loads: every rank pays for it, before its first step


CODE = """
import sys
import pretrain_gpt
for number, flags in enumerate(["", "--optimizer muon --normalization RMSNorm --recompute light"]):
    assert pretrain_gpt.main([*sys.argv[1:], "--output-dir", f"run{number}", *flags.split()]) == 0
slow = "torch._dynamo", "sympy", "triton", "transformers", "wandb"
print("loaded:", *(name for name in slow if name in sys.modules))
"""


def test_a_run_loads_neither_a_compiler_nor_what_it_does_not_use(tmp_path: Path) -> None:
    """torch would load its compiler at the first operator of ours, and sympy at the first backward: four seconds."""
    words = ["--mock-data", "--vocab-size", "128", "--preset", "gpt2-tiny", "--train-iters", "2"]
    done = run_cold(sys.executable, "-c", CODE, *words, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
