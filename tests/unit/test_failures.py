"""A rank that loses a connection, or the job's store, says which in one sentence."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megacore.parallel.mesh import lost_store
from megacore.train.failures import lost_connection

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
