"""The test harness itself: results, exceptions, deaths and hangs of ranks, and that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.distributed
from tests.distributed import RankFailed, run_distributed, start_server
from tests.patience import patience, until


def describe(rank: int, world_size: int, factor: float) -> dict[str, object]:
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    preloaded, threads = tests.distributed.SERVER_READY, torch.get_num_threads()
    return {"rank": rank, "world": world_size, "total": total, "threads": threads, "preloaded": preloaded}


def fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the number is wrong")
    dist.barrier()


def skip_a_collective(rank: int, world_size: int, pids: str) -> None:
    worker = subprocess.Popen(["sleep", "600"])
    Path(pids, str(rank)).write_text(f"{os.getpid()} {worker.pid}")
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def write_pid(rank: int, world_size: int, pids: str) -> None:
    Path(pids, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that waits for its parent has)."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_results_come_back_by_rank_from_the_warmed_server() -> None:
    """A preload that cannot be imported is skipped silently, and then every rank takes seconds to start."""
    for rank, result in enumerate(run_distributed(describe, 2, 0.5, stay=True)):
        torch.testing.assert_close(result.pop("total"), torch.tensor([0.5]), rtol=0, atol=0)
        assert result == {"rank": rank, "world": 2, "threads": 1, "preloaded": True}


def test_an_exception_names_its_rank_and_keeps_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 of 2 failed:.*fail_on_rank_one.*the number is wrong") as caught:
        run_distributed(fail_on_rank_one, 2)
    assert caught.value.ranks == [1]
    assert isinstance(caught.value.exception, ValueError)
    assert time.monotonic() - started < patience(20)  # the peers wait in a barrier for 90 s if they are let


def test_a_hang_shows_every_stack_and_leaves_nothing_running(tmp_path: Path) -> None:
    run_distributed(describe, 2, 0.5, stay=True)  # the ranks are alive, and need no time to start
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"no result within 0.2 s from rank\(s\) 0, 1 of 2") as caught:
        run_distributed(skip_a_collective, 2, str(tmp_path), timeout=0.2, stay=True)
    assert time.monotonic() - started < patience(20)
    text = str(caught.value)
    assert caught.value.ranks == [0, 1]
    assert text.count("in skip_a_collective") == 2
    assert text.count("in barrier") == 1
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    until(lambda: all(map(gone, pids)), 5, "processes are left")


def call_and_wait(address: str, pids: str) -> None:
    """A caller that uses the fork server at ``address``, and is not its parent."""
    forkserver._forkserver._forkserver_address = address  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    forkserver.ensure_running = forkserver._forkserver.ensure_running
    run_distributed(write_pid, 2, pids)


def test_a_killed_caller_takes_its_ranks_along(tmp_path: Path) -> None:
    start_server()  # the caller comes from it as well: a fork of this process, which has threads, may abort
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    caller = multiprocessing.get_context("forkserver").Process(target=call_and_wait, args=(address, str(tmp_path)))
    caller.start()
    pids: list[int] = []

    def started() -> bool:
        assert caller.is_alive()
        pids[:] = [int(file.read_text() or 0) for file in tmp_path.iterdir()]
        return len(pids) == 2 and all(pids)

    until(started, 60, "the ranks did not start")
    caller.kill()
    caller.join()
    until(lambda: all(map(gone, pids)), 5, "ranks are left")
