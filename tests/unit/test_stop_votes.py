"""What ranks decide from the sums of their votes: the weightiest reason of any of them, and whether one waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.config.checkpoint import CheckpointConfig
from megacore.train.stopping import Decision, StopRequests
from tests.unit.packaging_builds import ROOT

TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of before are there again after a test."""
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "step", "stop"),
    [([0, 0, 0], 3, None), ([0, INT, 0], 3, "SIGINT"), ([INT, 0, USR2], 3, "SIGUSR2"), ([TERM, INT, 0], 3, "SIGTERM"),
     ([INT, 0, TERM], 4, "--exit-interval 2")],
)  # fmt: skip
def test_the_weightiest_reason_of_any_rank_is_the_decision(
    signals: list[int], step: int, stop: str | None, handlers: None
) -> None:
    requests = [StopRequests(CheckpointConfig(exit_interval=2)) for _ in signals]
    for one, number in zip(requests, signals, strict=True):
        with one:
            if number:
                signal.raise_signal(number)
    votes = [one.votes(step, waiting=one is requests[1]) for one in requests]
    summed = [sum(column) for column in zip(*votes, strict=True)]
    assert requests[0].decision(summed) == Decision(stop=stop, some_rank_waits=True)
    assert requests[0].decision([*summed[:-2], 0, 0]) == Decision(stop=stop)


WHILE_TORCH_LOADS = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGUSR1)
            raise SystemExit(7)

sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_a_request_to_save_while_torch_loads_does_not_kill_the_rank(tmp_path: Path, program: str) -> None:
    flags = ["--mock-data", "--vocab-size", "64", "--train-iters", "2", "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", WHILE_TORCH_LOADS, str(ROOT / program), *flags, "--hang-timeout-minutes", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
