"""The process groups of a job: how long they wait, how many there are, and sums over some ranks of one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megacore.config import ParallelConfig
from megacore.errors import ConfigError
from megacore.parallel import direct, gloo, mesh
from megacore.parallel.collectives import all_gather_objects, all_reduce_, all_reduce_tied_
from megacore.parallel.mesh import Group, Holders, agree_on_devices, build_mesh, join_job, leave, select_device
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    """Of the default process group and of every other one that this rank is in."""
    config = make_config((2, 2, 1), "unused", distributed_timeout_minutes=3.5)
    build_mesh(config.parallel)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_subgroup_waits_as_long_as_configured() -> None:
    assert run_distributed(timeouts, 4, init=False) == [[timedelta(minutes=3.5)] * 2] * 4  # tp and pp


def sums_on_a_crowded_machine(rank: int, world_size: int, ranks_per_core: int) -> tuple[list[float], int]:
    """Sums of the ranks over every group of this rank, and how many threads of gloo serve them."""
    with mock.patch.object(gloo, "_CROWD", ranks_per_core):
        built = build_mesh(make_config((2, 2, 2), "unused").parallel)
    groups = (built.layer, built.pipeline, built.replicas, built.world)
    sums = [all_reduce_(torch.tensor([float(rank)]), group).item() for group in groups]
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sums, sum(name.startswith("gloo") for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads as Linux shows them")
def test_the_groups_of_a_rank_share_a_thread_where_many_ranks_share_a_core() -> None:
    crowded = run_distributed(sums_on_a_crowded_machine, 8, 0, init=False)
    apart = run_distributed(sums_on_a_crowded_machine, 8, 1000, init=False)
    assert [sums for sums, _ in crowded] == [sums for sums, _ in apart]
    assert [sums[-1] for sums, _ in apart] == [28.0] * 8
    assert ({threads for _, threads in crowded}, {threads for _, threads in apart}) == ({2}, {4})  # one for the world


def sums_of_joining_again(rank: int, world_size: int) -> list[float]:
    os.environ.pop("TORCH_GLOO_LAZY_INIT")  # ranks connect where they join, as under torchrun
    sums = []
    for _ in range(30):
        built = build_mesh(make_config((2, 1, 2), "unused").parallel)
        sums += [all_reduce_(torch.ones(1), group).item() for group in (built.layer, built.replicas, built.world)]
        leave(built)
    return sums


def test_a_process_may_leave_and_join_again() -> None:
    assert run_distributed(sums_of_joining_again, 4, init=False) == [[2.0, 2.0, 4.0] * 30] * 4


def communicators_of_a_tied_model(rank: int, world_size: int, directory: str) -> int:
    config = make_config((1, 3, 1), directory, train_iters=1)
    trainer = make_trainer(config, build_mesh(config.parallel))
    assert trainer.model.shared or rank == 1  # the first and the last stage hold the embedding
    return len(dist.distributed_c10d._world.pg_map)


def test_tied_parameters_need_no_communicator(tmp_path: Path) -> None:
    assert run_distributed(communicators_of_a_tied_model, 3, str(tmp_path)) == [1] * 3  # the world is the pipeline


def groups_made(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of all groups in whose making this rank takes part."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        build_mesh(make_config((2, 2, 1), "unused").parallel)
    return [tuple(call.args[0]) for call in new_group.call_args_list]


def test_a_rank_makes_no_groups_but_its_own() -> None:
    assert run_distributed(groups_made, 4) == [[(0, 2), (0, 1)], [(1, 3), (0, 1)], [(0, 2), (2, 3)], [(1, 3), (2, 3)]]


def objects(rank: int, world_size: int) -> bool:
    """Whether every rank's object is there, of groups of 5, 3 and 2 ranks."""
    world = build_mesh(make_config((1, 1, 5), "unused", global_batch_size=5).parallel).world
    found = True
    for ranks in ((0, 1, 2, 3, 4), (1, 2, 4), (0, 3)):
        if rank not in ranks:
            continue
        handle = world.handle if len(ranks) == 5 else dist.new_group(list(ranks), use_local_synchronization=True)
        group = Group(ranks=ranks, rank=ranks.index(rank), handle=handle)
        expected = [{"rank": r, "text": "x" * (r * 50_000)} for r in ranks]
        found &= all_gather_objects(expected[group.rank], group) == expected
    return found


def test_objects_of_all_ranks_arrive_in_group_order() -> None:
    assert run_distributed(objects, 5) == [True] * 5


def test_devices_are_compared_by_one_rank() -> None:
    """What a rank reads from the store does not grow with the number of ranks."""
    read: dict[int, int] = {}

    def compare(rank: int) -> None:
        store = mock.Mock(wraps=shared)
        agree_on_devices(store, rank, 6, lambda: torch.device("cpu"))
        asked = [1 for _ in store.get.call_args_list] + [len(call.args[0]) for call in store.multi_get.call_args_list]
        read[rank] = sum(asked)

    shared = dist.HashStore()
    with ThreadPoolExecutor(6) as ranks:
        list(ranks.map(compare, range(6)))
    assert read == {0: 7} | dict.fromkeys(range(1, 6), 1)


def sums_over_some(rank: int, world_size: int) -> list[bool]:
    """Whether the sums over ranks 0, 2 and 3 have the bits of terms added in that order; rank 1 takes no part."""
    direct._PART = 100  # several messages
    config = make_config((1, 4, 1), "unused")
    pipeline, members = build_mesh(config.parallel).pipeline, (0, 2, 3)
    if rank not in members:
        return []
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        terms = [torch.randn(7, 41, generator=torch.Generator().manual_seed(m)).mul(1000).to(dtype) for m in members]
        own = terms[members.index(rank)].clone()
        all_reduce_tied_(own, Holders(pipeline=pipeline, positions=members))
        found.append(torch.equal(own, terms[0] + terms[1] + terms[2]))
    return found


def test_a_sum_over_some_ranks_is_in_their_order() -> None:
    assert run_distributed(sums_over_some, 4) == [[True] * 3, [], [True] * 3, [True] * 3]


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
    store, identities = dist.HashStore(), dict[torch.device, str | None]()
    monkeypatch.setattr(mesh, "_identity", identities.get)

    def compare(rank: int) -> str:
        def select() -> torch.device:
            kind, _, identity = devices[rank].partition(" ")
            if kind == "none:":
                raise ConfigError([identity])
            identities[device := torch.device(kind, rank)] = identity or None
            return device

        try:
            agree_on_devices(store, rank, len(devices), select)
        except ConfigError as error:
            return str(error)
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
