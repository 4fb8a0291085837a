"""The processes that trace ranks: they end with the one that waits for them, and work after it has trained."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import environment, run_cold
from tests.patience import patience, until

SLEEPING = """
import os, time
from megacore.tracer.workers import in_processes

def step(rank):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)

list(in_processes(step, [0, 1], 2))
"""

# Plans of a process that has computed gradients.
LATE = """
import torch
from megacore.models.outline import outline
from megacore.tracer.memory import traced_memory
from tests.unit.refusals import parse

if __name__ == "__main__":
    torch.ones(3, requires_grad=True).sum().backward()
    words = "--mock-data --train-iters 9 --vocab-size 512 --preset gpt2-tiny --pp 2 --global-batch-size 4"
    config = parse(*words.split(), planned=True)
    assert all(rank.is_traced for rank in traced_memory(config, outline(config), on_cpu=False))
"""


def lives(pid: str) -> bool:
    """Whether a process runs; one that has ended may still have its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and asked for by number, on Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_process_outlives_the_one_that_traces(number: signal.Signals) -> None:
    """Only that one gets the signal."""
    command = [sys.executable, "-c", SLEEPING]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        children = [parent.stdout.readline().strip() for _ in range(2)]
        assert all(map(lives, children))
        parent.send_signal(number)
        parent.wait(patience(10))
        until(lambda: not any(map(lives, children)), 5, "a process that traces is left")
        assert parent.stderr.read().count("Traceback") == (1 if number == signal.SIGINT else 0)


@pytest.mark.slow
def test_a_process_that_has_computed_gradients_traces(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE, encoding="utf-8")
    done = run_cold(sys.executable, script, XDG_CACHE_HOME=tmp_path)
    assert done.returncode == 0, done.stderr
