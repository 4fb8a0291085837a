"""A rank's share of its node's cores, however the launcher lets ranks use them; and the turns that it takes on one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megacore.config import ParallelConfig
from megacore.parallel.mesh import build_mesh
from megacore.parallel.processors import share_of_cores
from tests.distributed import run_distributed
from tests.patience import patience
from tests.unit.packaging_builds import ROOT

EVERY = range(8)


@pytest.mark.parametrize(
    ("masks", "shares"),
    [([EVERY], [8]), ([EVERY] * 2, [4, 4]), ([EVERY, range(8, 16)], [8, 8]), ([range(6), range(4, 10)], [5, 5]),
     ([EVERY] * 3, [2, 2, 2]), ([range(1)] * 4, [1, 1, 1, 1])],
    ids=str,
)  # fmt: skip
def test_a_core_counts_for_those_that_may_use_it(masks: list[range], shares: list[int]) -> None:
    node = [frozenset(mask) for mask in masks]
    assert [share_of_cores(own, node) for own in node] == shares


def _policy(rank: int, world_size: int) -> int:
    build_mesh(ParallelConfig(dp=world_size, device="cpu"))
    return os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_ranks_on_a_cpu_take_long_turns() -> None:
    assert run_distributed(_policy, 2, init=False) == [os.SCHED_BATCH] * 2


# ---- deaths of other processes ---------------------------------------------------------------------------------------

needs_process_descriptors = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux has process descriptors")

START = """
import os, resource, signal, subprocess, sys, threading, time
import torch
from megacore.parallel.mesh import Mesh
from megacore.train import peers

other = subprocess.Popen(["sleep", "60"])
peers.all_gather_objects = lambda me, group: [me, peers.Peer(1, me.host, other.pid)]
"""


def run(script: str) -> tuple[int, str, str]:
    """Run a script that watches one other process, `other`; its exit status, and what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    command = [sys.executable, "-c", START + script, str(patience(5))]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60), check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@needs_process_descriptors
def test_a_death_is_seen_through_descriptors_of_any_number() -> None:
    status, _, said = run(
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
watch = peers.PeerWatch(Mesh(device=torch.device("cpu"), degrees={"pp": 2, "dp": 1, "tp": 1}))
assert watch.dead(0.0) == []
other.kill()
time.sleep(30)
"""
    )
    assert (status, said.partition("; pid ")[0]) == (1, "megacore: rank 1 (pp 1, dp 0, tp 0"), said
    assert said.endswith(" has died; stopping the others\n")


def test_a_stopped_watch_leaves_no_thread_and_no_handler() -> None:
    ended = run(
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
    assert ended == (0, "alive\n", "")
