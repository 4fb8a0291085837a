"""The trainer on a CUDA device: what it computes, keeps, saves and waits for. One GPU does for most of it.

`make gpu-check` runs these tests."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.device import host_synchronisations
from megacore import ops
from megacore.parallel import collectives
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.trainer import Trainer
from megacore.zero.memory import measured_bytes
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope", "num_query_groups": 2,
    "disable_bias_linear": True,
}  # fmt: skip
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def trainer_on(device: torch.device, directory: Path, **changes: Any) -> Trainer:
    return make_trainer(make_config((1, 1, 1), directory, **changes), Mesh(device=device))


def losses(trainer: Trainer, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    results = [trainer.train_step(next(trainer.batches)) for _ in range(steps)]
    return [(float(result.loss), float(result.grad_norm)) for result in results]


def agree(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def masters(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    for owned in trainer.model.data_parallel.segments:
        yield f"{owned.spec.name}[{owned.segment.start}:]", owned.master.detach().cpu().clone()


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(
    "changes",
    [{}, LLAMA, {"attention": "fused-softmax", "label_smoothing": 0.1, "offload_optimizer": True},
     {"recompute": "full"}, {"window_size": 5}],
    ids=["gpt2", "llama", "fused-softmax", "recompute", "window"],
)  # fmt: skip
def test_training_is_that_of_the_cpu(tmp_path: Path, kernels: ops.Choice, changes: dict[str, Any]) -> None:
    expected = losses(trainer_on(CPU, tmp_path / "cpu", **changes), 8)
    with ops.kernels_chosen(kernels):
        found = losses(trainer_on(GPU, tmp_path / "gpu", **changes), 8)
    agree(found, expected)


@pytest.mark.gpu
def test_initial_weights_are_those_of_the_cpu_to_the_bit(tmp_path: Path) -> None:
    found, expected = (dict(masters(trainer_on(device, tmp_path / device.type))) for device in (GPU, CPU))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_stay_close_to_fp32(tmp_path: Path, precision: str) -> None:
    """A step of bf16 rounds to 3 digits; what it costs over 20 steps is a few hundredths of the loss."""
    wide = losses(trainer_on(CPU, tmp_path / "wide"), 20)
    trainer = trainer_on(GPU, tmp_path / "narrow", precision=precision)
    narrow = losses(trainer, 20)
    skipped = trainer.update.skipped_steps
    assert skipped == 0 if precision == "bf16" else skipped <= 10
    assert narrow[0][0] == pytest.approx(wide[0][0], rel=5e-3)
    if not skipped:
        assert [loss for loss, _ in narrow] == pytest.approx([loss for loss, _ in wide], rel=2e-2)
    assert all(math.isfinite(loss) for loss, _ in narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("async_save", [False, True])
def test_a_saved_run_continues_on_either_device(tmp_path: Path, async_save: bool) -> None:
    through = trainer_on(GPU, tmp_path / "run", async_save=async_save)
    losses(through, 3)
    through.save()
    at_save = dict(masters(through))
    expected = losses(through, 3)
    for device, name in ((GPU, "again"), (CPU, "cpu")):
        resumed = trainer_on(device, tmp_path / name, load=str(tmp_path / "run"))
        assert resumed.step == 3
        assert all(torch.equal(value, at_save[key]) for key, value in masters(resumed))
        found = losses(resumed, 3)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, LLAMA], ids=["gpt2", "bf16", "llama"])
def test_a_step_waits_for_the_device_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whether to apply the update is the one thing that the host must know, however many microbatches there are."""
    for batch in (2, 8):
        trainer = trainer_on(GPU, tmp_path / str(batch), global_batch_size=batch, log_interval=1000, **changes)
        losses(trainer, 2)
        waits = host_synchronisations(lambda: trainer.train_step(next(trainer.batches)), GPU)  # noqa: B023
        assert waits is not None and waits <= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"precision": "bf16", "offload_optimizer": True}], ids=str
)
def test_the_device_holds_the_state_that_is_predicted(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Between steps nothing else is left but the last batch and a few scalars."""
    gc.collect()  # an earlier test's trainer, which refers to itself, would be freed while this one is measured
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU)
    trainer = trainer_on(GPU, tmp_path, hidden_size=256, **changes)
    losses(trainer, 2)
    held = torch.cuda.memory_allocated(GPU) - before
    counted = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
    on_host = ("optimizer", "buffers") if trainer.config.parallel.offload_optimizer else ()
    expected = sum(size for kind, size in counted.items() if kind not in on_host)
    predicted = sum(size for kind, size in trainer.metrics.predicted_memory.items() if kind not in on_host)
    assert expected == pytest.approx(predicted, rel=0.01)
    assert expected <= held <= expected * 1.1 + (1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 16), (False, None)])
def test_attention_never_writes_all_weights(dtype: torch.dtype, groups: int, causal: bool, window: int | None) -> None:
    """Each form that the models ask for has a fused kernel: torch refuses to run where it alone would be left."""
    view = ops.Visibility(causal=causal, window=window)
    query = torch.randn(2, 8, 64, 64, device=GPU, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, groups, 64, 64, device=GPU, dtype=dtype, requires_grad=True) for _ in range(2))
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(fused):
        found = ops.attention(query, key, value, view=view)
        gradients = torch.autograd.grad(found.square().sum(), (query, key, value))
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (query, key, value)]
    expected = ops.attention(*(tensor.float() for tensor in exact), view=view, implementation="fused-softmax")
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
        error = (one.detach().double().cpu() - other.detach().double()).abs().max()
        assert error <= bound * other.abs().max()


def calls_of_nccl(rank: int, world_size: int) -> dict[str, list[float]]:
    """What megacore asks of NCCL, in the types in which it does."""
    group = dist.group.WORLD
    x = torch.arange(4.0, device=GPU)
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        whole, shard = x.to(dtype).repeat(world_size), torch.empty(4, dtype=dtype, device=GPU)
        collectives.reduce_scatter_flat(shard, whole, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
        gathered = torch.empty(4 * world_size, dtype=dtype, device=GPU)
        collectives.all_gather_flat(gathered, shard, group=group, async_op=True).wait()
        dist.all_reduce(gathered, op=dist.ReduceOp.MAX, group=group)
        found[str(dtype)] = gathered.tolist()
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, {"rank": rank}, group=group)
    assert values == [{"rank": r} for r in range(world_size)]
    dist.barrier(group=group)
    return found


@pytest.mark.gpu
def test_nccl_knows_every_call_and_type() -> None:
    (found,) = run_distributed(calls_of_nccl, 1, backend="nccl")
    assert set(map(tuple, found.values())) == {(0.0, 1.0, 2.0, 3.0)}


def train_on_nccl(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> list[Any]:
    config = make_config(layout, directory, device="cuda", **changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    found = losses(trainer, 6)
    trainer.save()
    return found


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize(
    ("layout", "changes"),
    [((2, 1, 1), {}), *(((2, 1, 1), {"sequence_parallel": True, "async_tp": new}) for new in (False, True)),
     ((1, 2, 1), {}), ((1, 2, 1), {"schedule": "zero-bubble"}),
     *(((1, 1, 2), {"zero_stage": stage}) for stage in range(4))],
    ids=str,
)  # fmt: skip
def test_two_gpus_compute_what_one_does(tmp_path: Path, layout: Layout, changes: dict[str, Any]) -> None:
    expected = losses(trainer_on(GPU, tmp_path / "one"), 6)
    options: dict[str, Any] = {"backend": "nccl", "init": False, "timeout": 180}
    found = run_distributed(train_on_nccl, 2, layout, str(tmp_path / "two"), changes, **options)
    assert found[0] == found[1]
    agree(found[0], expected)
    assert list((tmp_path / "two").glob("step_*"))


def has_asked_for_cuda(rank: int, world_size: int) -> bool:
    return torch.cuda._is_in_bad_fork()


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_ranks_may_use_cuda() -> None:
    """Whoever asks the CUDA driver anything leaves it unusable to processes that are forked from it: the fork server
    must not, nor what it imports."""
    assert run_distributed(has_asked_for_cuda, 1) == [False]
