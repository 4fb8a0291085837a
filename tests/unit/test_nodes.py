"""A refusal names the flags of torchrun that start the right number of processes, on the nodes that the job has."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megacore.config.nodes import torchrun_flags
from megacore.parallel.mesh import lost_store
from megacore.train.causes import lost_connection


@pytest.mark.parametrize(
    ("counts", "world", "local", "flags"),
    [
        ((4,), None, None, "--nproc-per-node 4"),
        ((4, 8), 6, 6, "--nproc-per-node 4 or 8"),
        ((16,), 12, 16, "--nproc-per-node 16"),  # a node that runs as many
        ((64,), 1, 1, "--nnodes 8 --nproc-per-node 8"),
        ((8, 16), 12, 6, "--nnodes N --nproc-per-node M with N x M = 8 or 16"),
        ((12, 18), 16, 6, "--nnodes 2 or 3 --nproc-per-node 6"),
        ((4,), 2, 1, "--nnodes 4 --nproc-per-node 1"),
        ((12,), None, None, "--nnodes N --nproc-per-node M with N x M = 12"),
    ],
)
def test_the_flags_of_torchrun(counts: tuple[int, ...], world: int | None, local: int | None, flags: str) -> None:
    values = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    environment = {name: str(value) for name, value in values.items() if value is not None}
    assert torchrun_flags(*counts, environment=environment) == flags


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[/gloo/pair.cc:547] Connection closed by peer [10.83.0.2]:4711", "at 10.83.0.2 (Connection closed by peer)"),
        ("readv [10.83.0.2]:4711: Connection reset by peer", "another machine (Connection reset by peer)"),
        (
            "A call failed possibly due to a network error or a remote process exiting prematurely.",
            "exiting prematurely",
        ),
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
