"""torch's own: DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard, parallelize_module, and its pipelines."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, parallel
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison.job import Job, Layout, Step, Unsupported
from benchmarks.comparison.plain import ADAMW, PlainGPT, adamw, cross_entropy, decay_groups, microbatches


def name(layout: Layout) -> str:
    """What is measured."""
    many = {"interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}
    wrappers = ("DDP", "DDP + ZeroRedundancyOptimizer", "fully_shard, kept after forward", "fully_shard")
    named = {"parallelize_module": layout.tp, many.get(layout.schedule, "1F1B"): layout.pp}
    parts = [name for name, ranks in {**named, wrappers[_stage(layout)]: layout.dp}.items() if ranks > 1]
    return "torch: " + (", ".join(parts) or "plain")


def _stage(layout: Layout) -> int:
    """The stage that torch has for it: ZeroRedundancyOptimizer takes no tensors that parallelize_module splits."""
    return 2 if layout.zero == 1 and layout.tp > 1 else layout.zero


def build(job: Job) -> Step:
    """A step as torch's documentation writes it."""
    layout = job.layout
    if layout.ranks == 1:
        return _whole(job)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    step = _pipeline(job, mesh) if layout.pp > 1 else _whole(job, mesh)
    return parallel.loss_parallel()(step) if layout.tp > 1 else step


def _whole(job: Job, mesh: DeviceMesh | None = None) -> Step:
    """A step of all layers; without a mesh in one process."""
    plain, replica = PlainGPT(job), 0
    model: nn.Module = plain
    optimizer: torch.optim.Optimizer
    if mesh is None:
        optimizer = adamw(model)
    else:
        model = _parallel(plain, job, mesh)
        optimizer, replica = _optimizer(model, job, mesh), mesh["dp"].get_local_rank()
    batches = microbatches(job, replica)

    def step() -> float:
        optimizer.zero_grad()
        tokens, labels = next(batches)
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        return _number(loss)

    return step


def _number(loss: Tensor) -> float:
    """A loss that `loss_parallel` may have made a distributed tensor."""
    return cast(Tensor, loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()


def _parallel(model: PlainGPT, job: Job, mesh: DeviceMesh) -> nn.Module:
    """Split over the tensor-parallel ranks, then over the replicas."""
    layout = job.layout
    if layout.tp > 1:
        parallel.parallelize_module(model, mesh["tp"], _plan(model, layout))
        if layout.sequence_parallel and model.embedding is not None:
            positions: Any = model.embedding.positions
            positions.weight = nn.Parameter(distribute_tensor(positions.weight.data, mesh["tp"], [Shard(0)]))
    if layout.dp == 1:
        return model
    if _stage(layout) >= 2:
        for block in (*model.blocks.values(), model):
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=layout.zero == 3)
        return model
    if layout.tp > 1:
        _pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)


def _plan(model: PlainGPT, layout: Layout) -> dict[str, Any]:
    """Which module is split how, after torch's tutorial on tensor parallelism."""
    split = Shard(1) if layout.sequence_parallel else Replicate()
    plan: dict[str, Any] = {}
    if model.embedding is not None:
        plan["embedding.tokens"] = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=split)
    for number in model.blocks:
        block = f"blocks.{number}"
        plan |= {
            f"{block}.attention.qkv": parallel.ColwiseParallel(),
            f"{block}.attention.output": parallel.RowwiseParallel(output_layouts=split),
            f"{block}.mlp.up": parallel.ColwiseParallel(),
            f"{block}.mlp.down": parallel.RowwiseParallel(output_layouts=split),
        }
        if layout.sequence_parallel:
            whole = parallel.PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(Replicate(),))
            plan |= {f"{block}.{part}_norm": parallel.SequenceParallel() for part in ("attention", "mlp")}
            plan |= {f"{block}.{part}": whole for part in ("attention", "mlp")}
    if model.head is not None:
        plan["head.output"] = parallel.ColwiseParallel(input_layouts=split, use_local_output=False)
        if layout.sequence_parallel:
            plan["head.norm"] = parallel.SequenceParallel()
    return plan


def _optimizer(model: nn.Module, job: Job, mesh: DeviceMesh) -> torch.optim.Optimizer:
    if job.layout.dp == 1 or _stage(job.layout) != 1:
        return adamw(model)
    group = mesh["dp"].get_group()
    return ZeroRedundancyOptimizer(decay_groups(model), torch.optim.AdamW, process_group=group, **ADAMW)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _pipeline(job: Job, mesh: DeviceMesh) -> Step:
    layout = job.layout
    if layout.schedule == "zero-bubble" and len(job.stages) == layout.pp:
        raise Unsupported("its zero-bubble schedule takes two stages per rank, for which the model has too few blocks")
    rank, last = mesh["pp"].get_local_rank(), len(job.stages) - 1
    stages: list[Any] = []
    modules: list[nn.Module] = []
    for number in range(rank, len(job.stages), layout.pp):
        modules.append(_parallel(PlainGPT(job, job.stages[number]), job, mesh))
        stages.append(PipelineStage(modules[-1], number, last + 1, torch.device("cpu"), group=mesh["pp"].get_group()))
    count = layout.microbatches
    many = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}
    schedule: Any = (
        Schedule1F1B(stages[0], count, cross_entropy)
        if layout.schedule in ("default", "1f1b")
        else many[layout.schedule](stages, count, cross_entropy)
    )
    optimizer = _optimizer(nn.ModuleList(modules), job, mesh)
    batches = microbatches(job, mesh["dp"].get_local_rank())

    def step() -> float | None:
        optimizer.zero_grad()
        drawn = [next(batches) for _ in range(count)]
        tokens, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        losses: list[Tensor] = []
        targets = {"target": labels, "losses": losses} if rank == last % layout.pp else {}
        schedule.step(*((tokens,) if rank == 0 else ()), **targets)
        optimizer.step()
        return sum(map(_number, losses)) / count if losses else None

    return step
