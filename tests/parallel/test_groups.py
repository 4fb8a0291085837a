"""The process groups of a job: how long they wait, how many there are, in which order ranks share numbers, and on
which devices their ranks may be."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from megacore.config import ParallelConfig
from megacore.errors import ConfigError
from megacore.parallel import mesh
from megacore.parallel.collectives import all_reduce_, rows_of_ranks
from megacore.parallel.mesh import agree_on_devices, build_mesh, join_job, leave, select_device
from megacore.zero import bucket
from megacore.zero.compressed import CODES, CompressedSum
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, trainer_of


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    """Of the default process group and of every other one that this rank is in."""
    config = make_config((2, 2, 1), "unused", distributed_timeout_minutes=3.5)
    build_mesh(config.parallel)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_subgroup_waits_as_long_as_configured() -> None:
    assert run_distributed(timeouts, 4, init=False) == [[timedelta(minutes=3.5)] * 2] * 4  # tp and pp


def sums_of_joining_again(rank: int, world_size: int) -> list[float]:
    os.environ.pop("TORCH_GLOO_LAZY_INIT")  # ranks connect where they join, as under torchrun
    sums = []
    for _ in range(10):
        built = build_mesh(make_config((2, 1, 2), "unused").parallel)
        sums += [all_reduce_(torch.ones(1), group).item() for group in (built.layer, built.replicas, built.world)]
        leave(built)
    return sums


def test_a_process_may_leave_and_join_again() -> None:
    assert run_distributed(sums_of_joining_again, 4, init=False) == [[2.0, 2.0, 4.0] * 10] * 4


def groups_made(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of all groups in whose making this rank takes part."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        build_mesh(make_config((2, 2, 1), "unused").parallel)
    return [tuple(call.args[0]) for call in new_group.call_args_list]


def test_a_rank_makes_no_groups_but_its_own() -> None:
    assert run_distributed(groups_made, 4) == [[(0, 2), (0, 1)], [(1, 3), (0, 1)], [(0, 2), (2, 3)], [(1, 3), (2, 3)]]


def row(rank: int) -> list[float]:
    return [10.0 * rank, math.inf if rank == 1 else -rank / 3]


def rows_gathered(rank: int, world_size: int, layout: Layout) -> list[list[float]]:
    rows: list[list[float]] = rows_of_ranks(row(rank), build_mesh(make_config(layout, "unused").parallel)).tolist()
    return rows


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 2), (1, 2, 2)])
def test_rows_of_all_ranks_are_in_the_order_of_the_ranks(layout: Layout) -> None:
    """Also where the groups that gather them one after the other give another order."""
    ranks = math.prod(layout)
    assert run_distributed(rows_gathered, ranks, layout) == [[row(rank) for rank in range(ranks)]] * ranks


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch see devices of a kind; what is selected must be one of them."""

    def see(kind: str, count: int, local_rank: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", range(count).__getitem__)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return see


def test_auto_is_cuda_or_the_cpu(accelerator: Callable[..., None]) -> None:
    accelerator("xpu", 8, local_rank=1)
    assert select_device("auto") == torch.device("cpu")
    assert select_device("xpu") == torch.device("xpu", 1)
    accelerator("cuda", 8, local_rank=1)
    assert select_device("auto") == torch.device("cuda", 1)


def test_a_process_that_sees_one_device_takes_it_whatever_its_local_rank(accelerator: Callable[..., None]) -> None:
    accelerator("cuda", 1, local_rank=5)
    assert select_device("auto") == torch.device("cuda", 0)
    accelerator("cuda", 4, local_rank=5)
    with pytest.raises(ConfigError, match=r"local rank 5, but this process sees 4 devices: start at most 4 ranks"):
        select_device("auto")


def refusals(monkeypatch: pytest.MonkeyPatch, *devices: str) -> list[str]:
    """What each rank says of these devices, of which each is torch's name of its kind and its identity, or a reason why
    there is none."""
    shared, identities = dist.HashStore(), dict[torch.device, str | None]()
    monkeypatch.setattr(mesh, "identity_of", identities.get)

    def compare(rank: int) -> str:
        def select() -> torch.device:
            kind, _, identity = devices[rank].partition(" ")
            if kind == "none:":
                raise ConfigError([identity])
            identities[device := torch.device(kind, rank)] = identity or None
            return device

        store = mock.Mock(wraps=shared)
        try:
            agree_on_devices(store, rank, len(devices), select)
        except ConfigError as error:
            return str(error)
        # What a rank reads does not grow with the number of ranks.
        assert (store.get.call_count, store.multi_get.call_count) == (1, rank == 0)
        return ""

    with ThreadPoolExecutor(len(devices)) as ranks:
        return list(ranks.map(compare, range(len(devices))))


HOST = socket.gethostname()


def test_ranks_that_share_a_device_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals(monkeypatch, "cuda GPU-1", "cuda GPU-2", "cuda GPU-3") == [""] * 3
    assert refusals(monkeypatch, "xpu", "xpu") == [""] * 2  # a kind of device that has no identity
    told = refusals(monkeypatch, "cuda GPU-1", "cuda GPU-2", "cuda GPU-1")
    assert told == told[:1] * 3
    assert f"ranks 0, 2 have the same device, GPU-1 on {HOST}: " in told[0]
    assert "srun --gpus-per-task 1" in told[0]


def test_ranks_on_devices_of_different_kinds_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose driver does not work has none: its ranks would meet the others' in another backend, and never."""
    told = refusals(monkeypatch, "cuda GPU-1", "cuda GPU-2", "cpu", "cpu")
    assert told == told[:1] * 4
    assert f"ranks 2, 3 would compute on cpu (rank 2 on {HOST}), ranks 0, 1 on cuda: with --device auto" in told[0]


def test_ranks_without_a_device_are_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusals(monkeypatch, "none: no such device", "cuda GPU-2", "none: no such device")
    assert told == [f"  - no such device (ranks 0, 2, {HOST})"] * 3


def joins(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        join_job(ParallelConfig(device="pretend" if rank == 0 else "cpu"))
    return str(error.value)


@needs_pretend
def test_a_rank_without_the_others_kind_of_device_does_not_keep_them_waiting() -> None:
    told = run_distributed(joins, 2, backend="pretend", init=False, timeout=30)
    assert told == told[:1] * 2
    assert "rank 1 would compute on cpu" in told[0]


# ---- torch's own record of operations, whose entries keep holes in the heap of a rank on a CPU

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


def sums_beside_backward(rank: int, world_size: int, output_dir: str, stages: list[int]) -> list[tuple[int, int]]:
    """Of each ZeRO stage: sums over the groups with copies of a shard that begin in backward, and in all of a step."""
    found = []
    for stage in stages:
        changes = {"zero_stage": stage, "zero_shard_size": 2, "num_layers": 4, "micro_batch_size": 1}
        trainer = trainer_of((1, 1, world_size), f"{output_dir}/{stage}", **changes)
        trainer.train_steps.compute_gradients(next(trainer.batches))  # which nobody takes
        with mock.patch.object(bucket, "start_all_reduce_", wraps=bucket.start_all_reduce_) as begun:
            trainer.train_steps.compute_gradients(next(trainer.batches))
            in_backward = begun.call_count
            trainer.train_steps.update_weights()
        found.append((in_backward, begun.call_count))
    return found


def test_sums_over_groups_of_shards_begin_beside_backward(tmp_path: Path) -> None:
    """All but that of the first layers, whose gradients are the last to arrive."""
    for in_backward, in_all in run_distributed(sums_beside_backward, 4, str(tmp_path), [1, 2, 3])[0]:
        assert in_backward == in_all - 1 >= 4


# ---- sums of which one bit of each number travels


def drawn(seed: int) -> torch.Tensor:
    """Four blocks of numbers; those count that are above 0 where the seed is 9."""
    return torch.rand(4, CODES["sign"].format.block, generator=torch.Generator().manual_seed(seed)) - 0.3


def sums_of_signs(rank: int, ranks: int) -> list[torch.Tensor]:
    group, counted = build_mesh(make_config((1, 1, ranks), "unused").parallel).replicas, drawn(9).flatten() > 0
    compressed = CompressedSum(len(counted), group, CODES["sign"], device=counted.device, passes_on=True)
    compressed.restrict(counted)
    found = []
    for step in range(3):
        compressed.begin(drawn(10 * rank + step).flatten())
        found.append(compressed.whole_sum())
    return found


def test_sums_of_signs_are_those_of_a_loop_wherever_their_parts_are_added() -> None:
    """What a message leaves out is added to the next one, and what does not count stays 0 on every rank."""

    def sent(x: torch.Tensor) -> torch.Tensor:
        scale = x.norm(dim=1, keepdim=True) / counted.sum(1, keepdim=True).sqrt()
        return torch.where(x >= 0, scale, -scale) * counted

    found, counted = run_distributed(sums_of_signs, 2), drawn(9) > 0
    left, left_of_sum = [torch.zeros(counted.shape)] * 2, torch.zeros(counted.shape)
    for step in range(3):
        given = [left[rank] + drawn(10 * rank + step) * counted for rank in range(2)]
        left = [x - sent(x) for x in given]
        total = left_of_sum + sum(map(sent, given))
        left_of_sum = total - sent(total)
        for ranks in found:
            torch.testing.assert_close(ranks[step].view(counted.shape), sent(total), rtol=1e-5, atol=0)
