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


@pytest.mark.parametrize(
    ("masks", "shares"),
    [
        ([range(8)], [8]),
        ([range(8), range(8)], [4, 4]),
        ([range(8), range(8, 16)], [8, 8]),
        ([range(6), range(4, 10)], [5, 5]),
        ([range(8)] * 3, [2, 2, 2]),
        ([range(1)] * 4, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_a_core_counts_for_those_that_may_use_it(masks: list[range], shares: list[int]) -> None:
    node = [frozenset(mask) for mask in masks]
    assert [share_of_cores(own, node) for own in node] == shares


def _policy(rank: int, world_size: int) -> int:
    build_mesh(ParallelConfig(dp=world_size, device="cpu"))
    return os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_ranks_on_a_cpu_take_long_turns() -> None:
    assert run_distributed(_policy, 2, init=False) == [os.SCHED_BATCH] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_a_policy_that_the_user_chose_stays() -> None:
    program = (
        "import os\n"
        "from megacore.parallel.processors import take_long_turns\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "take_long_turns()\n"
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"
