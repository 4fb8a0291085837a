"""The pretend accelerator refuses and shows what a GPU does not forgive; every fault planted here is caught."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacore.parallel.graphs import Recorded
from tests.accelerator.device import counting, limit_memory, needs_pretend
from tests.distributed import RankFailed, run_distributed

pytestmark = needs_pretend


def check_mixing(rank: int, world_size: int) -> None:
    """Host and device, and two devices, do not mix."""
    here, host = torch.ones(3, device="pretend"), torch.ones(3)
    assert here.device == torch.device("pretend", 0)
    for mix in (lambda: here + host, lambda: torch.where(here > 0, host, here), lambda: here.add_(host)):
        with pytest.raises(RuntimeError, match=r"mixes host and device tensors|to be on the same device"):
            mix()
    with pytest.raises(TypeError, match="can't convert pretend"):
        here.numpy()
    assert (here * torch.tensor(2.0)).tolist() == [2.0] * 3  # a scalar tensor may lie on the host
    there = torch.ones(3, device="pretend:1")
    with pytest.raises(RuntimeError, match=r"mixes tensors of devices 0 and 1|to be on the same device"):
        here + there
    assert (here + there.to("pretend:0")).tolist() == [2.0] * 3


def check_memory(rank: int, world_size: int) -> None:
    """Memory is counted, and fresh memory is NaN."""
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    assert torch.empty(7, device="pretend").isnan().all()
    large, allocated = torch.empty(1 << 20, dtype=torch.uint8, device="pretend"), torch.accelerator.memory_allocated
    assert (allocated() - before, allocated(1)) == (1 << 20, 0)
    large.untyped_storage().resize_(1 << 10)
    assert allocated() - before == 1 << 10
    del large
    assert allocated() == before
    assert torch.accelerator.max_memory_allocated() - before >= 1 << 20
    assert torch.empty(3, pin_memory=True)[1:].is_pinned()
    assert torch.zeros(3).pin_memory().is_pinned()
    assert not torch.zeros(3).is_pinned()
    limit_memory(before + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="exceed the limit"):
        torch.empty(1 << 19, device="pretend")
    limit_memory(1 << 30)


def check_counters(rank: int, world_size: int) -> None:
    """Synchronisations, operators and bytes are counted."""
    x = torch.arange(8.0, device="pretend")
    pinned = torch.empty(8, pin_memory=True)
    causes = {  # what is done -> host synchronisations, bytes to the device, bytes to the host
        lambda: x + 1: (0, 0, 0),
        lambda: x.sum().item(): (1, 0, 4),
        lambda: pinned.to("pretend", non_blocking=True): (0, 32, 0),
        lambda: x.cpu(): (1, 0, 32),
        lambda: torch.zeros(8).to("pretend"): (1, 32, 0),
        lambda: pinned.copy_(x, non_blocking=True): (0, 0, 32),
        lambda: x.to("cpu", non_blocking=True): (0, 0, 32),
        lambda: torch.zeros(4).copy_(x[:4], non_blocking=True): (1, 0, 16),
        lambda: x.nonzero(): (1, 0, 0),
        lambda: x[torch.tensor([1, 2])]: (1, 16, 0),
        lambda: x[torch.tensor([1, 2], device="pretend")]: (1, 16, 0),  # of which the copy is one
        lambda: torch.accelerator.synchronize(): (1, 0, 0),
    }
    for number, (action, expected) in enumerate(causes.items()):
        with counting() as c:
            action()
        assert (c.host_syncs, c.bytes_to_device, c.bytes_to_host) == expected, (number, c)
    with counting() as c:
        (x * 2).sum().item()
    assert c.operators == 2
    assert len(c.sync_causes) == 1
    assert re.fullmatch(r"item at .*test_device\.py:\d+ in check_counters", c.sync_causes[0])


def check_copies(rank: int, world_size: int) -> None:
    """A copy that nobody waits for has not happened."""
    x, pinned = torch.ones(4, device="pretend"), torch.zeros(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()  # nobody has waited
    event = torch.Event("pretend")
    event.record()
    event.synchronize()
    assert pinned.tolist() == [1.0] * 4
    y = torch.zeros(4, pin_memory=True)
    z = y.to("pretend", non_blocking=True)
    y.fill_(5.0)  # too early: the device has not read it
    assert z.tolist() == [5.0] * 4
    later = y.to("pretend", non_blocking=True)
    torch.accelerator.synchronize()
    y.fill_(6.0)
    assert later.tolist() == [5.0] * 4
    pinned.copy_(later * 2, non_blocking=True)
    assert pinned.to("pretend", non_blocking=True).tolist() == [10.0] * 4  # ordered on the device, without the host


def check_streams(rank: int, world_size: int) -> None:
    """Streams are ordered by events only."""
    main, side = torch.accelerator.current_stream(), torch.Stream("pretend")
    x = torch.ones(4, device="pretend")
    x.fill_(2.0)
    torch.accelerator.set_stream(side)
    with pytest.raises(RuntimeError, match="aten::mul reads memory that aten::fill_ still writes: nothing has waited"):
        x * 2
    side.wait_stream(main)
    y = x * 2
    torch.accelerator.set_stream(main)
    with pytest.raises(RuntimeError, match="aten::add reads memory that aten::mul still writes: nothing has waited"):
        y + 1
    with pytest.raises(RuntimeError, match="aten::zero_ writes memory that aten::mul still reads: nothing has waited"):
        x.zero_()
    done = side.record_event()
    main.wait_event(done)
    assert (y + 1).tolist() == [5.0] * 4
    x.zero_()


def check_reuse(rank: int, world_size: int) -> None:
    """Memory is given back to the stream that it was allocated on, which may use it at once."""
    main, side = torch.accelerator.current_stream(), torch.Stream("pretend")

    def used_beside() -> torch.Tensor:
        x = torch.ones(4, device="pretend")
        side.wait_stream(main)
        with side:
            x.sum()
        return x

    x, told = used_beside(), "memory is freed that aten::sum still reads on another stream than the one it was"
    del x
    with pytest.raises(RuntimeError, match=told):
        torch.ones(4, device="pretend")
    x = used_beside()
    main.wait_stream(side)
    del x
    x = used_beside()
    x.record_stream(side)
    del x
    x = used_beside()
    side.synchronize()
    del x
    pinned = torch.ones(4, pin_memory=True)
    x = torch.zeros(4, device="pretend")
    side.wait_stream(main)
    with side:
        x.copy_(pinned, non_blocking=True)
    del x
    with pytest.raises(RuntimeError, match="memory is freed that a non-blocking copy to the device still writes"):
        torch.accelerator.synchronize()
    with side:
        x = pinned.to("pretend", non_blocking=True)
        del x  # the next use of it comes after the copy
    torch.accelerator.synchronize()


@pytest.mark.parametrize(
    "check", [check_mixing, check_memory, check_counters, check_copies, check_streams, check_reuse]
)
def test_one_device_is_as_strict_as_a_gpu(check: Any) -> None:
    run_distributed(check, 1, backend="pretend", init=False)


def unwaited_gather(rank: int, world_size: int) -> None:
    whole, shard = torch.zeros(8, device="pretend"), torch.ones(4, device="pretend")
    dist.all_gather_into_tensor(whole, shard, async_op=True)
    whole.sum()


def waited_on_another_stream(rank: int, world_size: int) -> None:
    x = torch.ones(4, device="pretend")
    work = dist.all_reduce(x, async_op=True)
    with torch.Stream("pretend"):
        work.wait()
    x * 2


def wrong_tensor(rank: int, world_size: int, *, device: str, shape: tuple[int, ...] = (4,)) -> None:
    dist.all_reduce(torch.ones(shape, device=device).t())


def different_collectives(rank: int, world_size: int) -> None:
    x, y = torch.ones(4, device="pretend"), torch.ones(2, device="pretend")
    for tensor in (x, y) if rank == 0 else (y, x):
        dist.all_reduce(tensor)


def different_order_of_transfers(rank: int, world_size: int) -> None:
    x, y = torch.ones(4, device="pretend"), torch.empty(4, device="pretend")
    works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()


def captured(rank: int, world_size: int, *, compute: Any) -> None:
    Recorded().capture(partial(compute, torch.ones(4, device="pretend")))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (unwaited_gather, r"aten::sum reads memory that all_gather_into_tensor\(float32\[4\]\) at .* still writes"),
        (waited_on_another_stream, r"aten::mul reads memory that all_reduce\(sum, float32\[4\]\) at .* still writes"),
        (partial(wrong_tensor, device="cpu"), r"all_reduce\(sum, float32\[4\]\) at .*: a tensor is on cpu"),
        (partial(wrong_tensor, device="pretend", shape=(4, 4)), r"must be contiguous, and one has strides \(1, 4\)"),
        (partial(wrong_tensor, device="pretend:0"), r"a tensor is on pretend:0, and this rank's device is pretend:1"),
        (
            different_collectives,
            r"are in different collectives .*\n.*rank 0 .*: all_reduce\(sum, float32\[4\]\) at .*test_device.py:\d+"
            r".*\n.*rank 1 .*: all_reduce\(sum, float32\[2\]\) at",
        ),
        (partial(captured, compute=torch.nonzero), r"aten.nonzero.default, for which the host waits"),
        (partial(captured, compute=torch.Tensor.cpu), r"aten._to_copy.default, for which the host waits"),
        (partial(captured, compute=torch.bernoulli), r"aten.bernoulli.default, which draws numbers"),
        (different_order_of_transfers, r"wait for each other, which hangs on a device:\n.* send float32\[4\] to rank"),
    ],
    ids=["no wait", "stream", "host", "strides", "device", "collectives", "size", "copy", "draw", "order"],
)
def test_a_planted_fault_is_caught_at_once(fault: Any, said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        run_distributed(fault, 2, backend="pretend", timeout=20)
