"""The collectives that devices take, on gloo, which has them too; CPUs themselves exchange messages instead."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megacore.parallel import collectives
from megacore.parallel.mesh import Group
from tests.distributed import run_distributed
from tests.parity.runs import Outcome, bitwise, train

STAGES = (1, 2, 3)


def check_values(rank: int, world_size: int) -> None:
    collectives._by_messages = lambda whole, group: False
    group = Group(ranks=tuple(range(world_size)), rank=rank, handle=dist.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        whole = torch.arange(4 * world_size).to(dtype) * (rank + 1)
        shard = torch.empty(4, dtype=dtype)
        collectives.start_reduce_scatter(shard, whole, group).wait()
        total = world_size * (world_size + 1) // 2
        assert torch.equal(shard, (torch.arange(4) + 4 * rank).to(dtype) * total)
        gathered = torch.empty(4 * world_size, dtype=dtype)
        collectives.start_all_gather(gathered, shard, group).wait()
        assert torch.equal(gathered, torch.arange(4 * world_size).to(dtype) * total)
        own = gathered.chunk(world_size)[rank]
        own += 1  # a shard may lie in the whole
        collectives.start_all_gather(gathered, own, group).wait()
        assert torch.equal(gathered, torch.arange(4 * world_size).to(dtype) * total + 1)


def test_sums_and_parts_are_exact() -> None:
    run_distributed(check_values, 3)


def train_both(rank: int, world_size: int, directory: str) -> list[tuple[Outcome, Outcome] | None]:
    by_messages, pairs = collectives._by_messages, []
    for stage in STAGES:
        changes: dict[str, Any] = {"zero_stage": stage, "num_layers": 2, "train_iters": 3}
        collectives._by_messages = lambda whole, group: False
        flat = train(rank, world_size, (1, 1, 2), directory, changes)
        collectives._by_messages = by_messages
        plain = train(rank, world_size, (1, 1, 2), directory, changes)
        pairs.append(None if flat is None or plain is None else (flat, plain))
    return pairs


def test_training_with_them_gives_the_same_bits(tmp_path: Any) -> None:
    """Two terms have the same sum in either order."""
    for pair in run_distributed(train_both, 2, str(tmp_path), timeout=120)[0]:
        bitwise(*pair)
