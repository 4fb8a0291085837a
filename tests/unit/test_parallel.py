"""A rank's share of its node's cores, and its turns on one; deaths of other ranks; copies of parameters."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megacore.config import ParallelConfig
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.parallel.mesh import build_mesh, lost_store
from megacore.parallel.processors import share_of_cores
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter, ShardSpec, sharded_parameters
from megacore.pipeline.stage import Stage
from megacore.train.failures import lost_connection
from tests.distributed import run_distributed
from tests.parity.runs import make_config
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
time.sleep(2 * float(sys.argv[1]))
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


# ---- shards of parameters --------------------------------------------------------------------------------------------


SPEC = replace(ShardSpec.split((8, 3), {0: (4, 6)}), name="blocks.1.mlp.up.weight")


@pytest.mark.parametrize("way", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copy_is_the_same_slice(way: object, requires_grad: bool) -> None:
    parameter = ShardedParameter(torch.randn(2, 3), SPEC, requires_grad)
    found = way(parameter)  # type: ignore[operator]
    assert (type(found), found.spec, found.requires_grad) == (ShardedParameter, SPEC, requires_grad)
    assert torch.equal(found, parameter) and found.data_ptr() != parameter.data_ptr()


def stage(device: str) -> Stage:
    """All layers of a small GPT."""
    config = make_config((1, 1, 1), "unused", position_embedding_type="learned")
    context = BuildContext(device=torch.device(device), streams=RandomStreams(0, torch.device("cpu")))
    return Stage(gpt_layers(config.model, context))


def test_a_model_without_memory_gets_it_and_keeps_its_specs() -> None:
    empty, expected = stage("meta"), {p.spec.name: p.spec for p in sharded_parameters(stage("cpu"))}
    empty.to_empty(device="cpu")
    found = sharded_parameters(empty)
    assert {p.spec.name: p.spec for p in found} == expected
    assert all(p.device.type == "cpu" and p.requires_grad for p in found)


# ---- lost connections


EXIT = "A call failed possibly due to a network error or a remote process exiting prematurely."


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[/gloo/pair.cc:547] Connection closed by peer [10.83.0.2]:4711", "at 10.83.0.2 (Connection closed by peer)"),
        ("readv [10.83.0.2]:4711: Connection reset by peer", "another machine (Connection reset by peer)"),
        (EXIT, "exiting prematurely"),
    ],
)
def test_a_lost_connection_is_told_without_a_traceback(said: str, told: str) -> None:
    assert told in str(lost_connection(RuntimeError(said)))
    assert lost_connection(RuntimeError("a bug")) is None


def test_a_lost_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "the job's store at head:29500" in str(lost_store(dist.DistNetworkError("Failed to recv, got 0 bytes")))
    assert lost_store(RuntimeError("a bug")) is None
