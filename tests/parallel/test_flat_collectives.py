"""The collectives that devices take, on gloo, which has them too, beside the messages that CPUs exchange instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacore.parallel import collectives
from megacore.parallel.mesh import Group
from tests.distributed import run_distributed
from tests.parity.runs import Outcome, bitwise, train

STAGES = (1, 3)


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
    # gloo would sum what lies between
    gaps, rows = torch.arange(8.0 * world_size)[::2], torch.ones(4, 2 * world_size).t()
    for call in (
        lambda: collectives.all_reduce_(gaps, group),
        lambda: collectives.start_all_reduce_(gaps, group),
        lambda: collectives.start_all_gather(torch.empty(4 * world_size**2), gaps, group),
        lambda: collectives.start_reduce_scatter(torch.empty(4), gaps, group),
        lambda: collectives.PartsExchanged(rows, group),
        lambda: collectives.RowsExchanged(rows, [2] * world_size, [2] * world_size, group),
        lambda: collectives.Shift(rows, group),
    ):
        with pytest.raises(AssertionError, match="it must be contiguous"):
            call()


def test_sums_and_parts_are_exact() -> None:
    run_distributed(check_values, 3)


def check_small_sums(rank: int, world_size: int) -> None:
    group = Group(ranks=tuple(range(world_size)), rank=rank, handle=dist.group.WORLD)
    terms = torch.randn(world_size, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    in_order = terms[0]
    for term in terms[1:]:
        in_order = in_order + term
    for count in (24, 1):  # the largest such sum, and a scalar
        mine = terms[rank, :count].clone()
        pending = collectives.start_all_reduce_(mine, group)
        other = collectives.all_reduce_(terms[rank, :count].clone(), group)  # while the first is under way
        pending.wait()
        assert torch.equal(mine, in_order[:count])
        assert torch.equal(other, mine)
    whole = collectives.all_reduce_(torch.full((), 1 << rank), group)
    assert int(whole) == (1 << world_size) - 1
    largest = collectives.all_reduce_(torch.full((), float(rank)), group, "max")
    assert float(largest) == world_size - 1


def test_sums_of_a_few_numbers_add_in_the_order_of_the_ranks() -> None:
    run_distributed(check_small_sums, 4)


def _chosen(by_messages: bool, whole: torch.Tensor, group: Group) -> bool:
    return by_messages


def check_sums_in_place(rank: int, world_size: int) -> None:
    group = Group(ranks=tuple(range(world_size)), rank=rank, handle=dist.group.WORLD)
    terms = torch.randn(world_size, world_size, 5, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(5)
    in_order = terms[0]
    for term in terms[1:]:
        in_order = in_order + term
    for by_messages in (True, False):
        collectives._by_messages = partial(_chosen, by_messages)
        whole, apart = terms[rank].flatten(), torch.empty(5)
        collectives.start_reduce_scatter(apart, terms[rank].flatten(), group).wait()
        collectives.start_reduce_scatter(whole.chunk(world_size)[rank], whole, group).wait()
        assert torch.equal(whole.chunk(world_size)[rank], apart)
        untouched = torch.arange(world_size) != rank
        assert torch.equal(whole.view(world_size, 5)[untouched], terms[rank][untouched])
        if by_messages:
            assert torch.equal(apart, in_order[rank])


def test_a_sum_in_place_has_the_bits_of_one_apart_and_touches_nothing_else() -> None:
    """By messages terms are added in the order of the ranks, wherever the sum goes."""
    run_distributed(check_sums_in_place, 4)


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


@pytest.mark.slow
def test_training_with_them_gives_the_same_bits(tmp_path: Any) -> None:
    """Two terms have the same sum in either order."""
    for pair in run_distributed(train_both, 2, str(tmp_path), timeout=120)[0]:
        bitwise(*pair)
