"""torch's own record of operations, whose entries keep holes in the heap of a rank on a CPU: off unless asked for."""

from __future__ import annotations

import os

import pytest
import torch
import torch._C._distributed_c10d as c10d

from megacore.config import ParallelConfig
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import join_job
from tests.distributed import run_distributed

OPERATIONS = 5


def recorded(rank: int, world_size: int, size: str | None) -> int:
    """How many operations torch has recorded after some sums."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.pop(name, None)
    if size is not None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = size
    _, world = join_job(ParallelConfig(dp=world_size, device="cpu"))
    for _ in range(OPERATIONS):
        all_reduce_(torch.ones(1000), world)
    record: bytes = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)  # type: ignore[attr-defined]
    return record.count(b'"record_id"')


@pytest.mark.skipif(not hasattr(c10d, "_dump_fr_trace_json"), reason="this torch records no operations of gloo")
@pytest.mark.parametrize(("size", "most"), [(None, 0), ("3", 3)])
def test_gloo_records_what_the_user_asks_for(size: str | None, most: int) -> None:
    assert run_distributed(recorded, 2, size, init=False) == [most, most]
