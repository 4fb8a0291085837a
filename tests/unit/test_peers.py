"""The watch over the other processes of a machine, each time in a process of its own, which the watch may end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

needs_process_descriptors = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux has process descriptors")

START = """
import os, resource, signal, subprocess, sys, threading, time
import torch
from megacore.parallel.mesh import Mesh
from megacore.train import peers

other = subprocess.Popen(["sleep", "60"])
peers.all_gather_objects = lambda me, group: [me, peers.Peer(1, me.host, other.pid)]
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that watches one other process, `other`."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.run(
        [sys.executable, "-c", START + script, str(patience(5))],
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


@needs_process_descriptors
def test_a_death_is_seen_through_descriptors_of_any_number() -> None:
    done = run(
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
watch = peers.PeerWatch(Mesh(device=torch.device("cpu"), degrees={"pp": 2, "dp": 1, "tp": 1}))
assert watch.dead(0.0) == []
other.kill()
time.sleep(30)
"""
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("megacore: rank 1 (pp 1, dp 0, tp 0; pid ")
    assert done.stderr.endswith(" has died; stopping the others\n")


def test_a_stopped_watch_leaves_no_thread_and_no_handler() -> None:
    done = run(
        """
watch = peers.PeerWatch(Mesh(device=torch.device("cpu"), degrees={"pp": 2, "dp": 1, "tp": 1}))
start = time.monotonic()
watch.stop()
assert time.monotonic() - start < float(sys.argv[1])
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
os.kill(os.getpid(), signal.SIGUSR1)  # asks for a save, too late
other.kill()
other.wait()
time.sleep(0.5)
print("alive")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
