"""The recipe: from the description of a model to this rank's part of it, ready to train. The order is the knowledge. A
stage is partitioned (uneven counts are balanced, nothing is dropped), and then made layer by layer, so that on ZeRO
stage 3 no more than one layer is ever whole: see `_layers`, and the data parallelism that takes each layer from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megacore.config import ResolvedConfig
from megacore.config.fp8 import is_fp8
from megacore.config.parameter_groups import DECOUPLED, ParameterGroups
from megacore.config.reproducible import canonical_blocks
from megacore.errors import ConfigError
from megacore.layers.lora import begin_magnitudes
from megacore.layers.reproducible import make_reproducible
from megacore.models.spec import LayerSpec
from megacore.optim.optimizers import has_one_pass
from megacore.parallel import async_tp, fp8
from megacore.parallel.collectives import all_gather_objects, all_reduce_tied_
from megacore.parallel.compiled import compile_layer
from megacore.parallel.graphs import Graphed, graphs_of
from megacore.parallel.mesh import ALONE, Holders, Mesh
from megacore.parallel.products import adds_in_fp32
from megacore.parallel.recompute import Recomputed
from megacore.parallel.saved import Kept, Offload
from megacore.parallel.sharding import ShardedParameter, sharded_parameters
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.schedule_file import placement
from megacore.pipeline.stage import Stage
from megacore.pipeline.transport import Transport
from megacore.train.task import DTYPES, Task
from megacore.zero.data_parallel import DataParallel
from megacore.zero.options import ZeroOptions


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """This rank's part of the model."""

    stages: list[range]  # which layers every pipeline stage holds
    chunks: list[Stage]  # this rank's stages
    parameters: dict[str, ShardedParameter]  # of this rank that learn, by global name
    runtime: PipelineRuntime  # runs microbatches through the pipeline
    data_parallel: DataParallel  # divides parameters, gradients and optimizer state over replicas
    shared: dict[str, Holders]  # global names of tied parameters that other ranks hold too, and who holds them
    tied_copies: frozenset[str]  # those of them whose first use lies on another rank


def parallelize(task: Task, config: ResolvedConfig, mesh: Mesh) -> ParallelModel:
    """Build this rank's stages and everything that makes them take part in the whole."""
    stages = stage_ranges(task.layers, config)
    placed = placement(config.parallel)
    held = placed.stages_of(mesh.pipeline.rank)
    users = _stages_of_tied(task.layers, stages)
    holders = {name: tuple(sorted(set(map(placed.rank_of, numbers)))) for name, numbers in users.items()}
    shared = {n: Holders(pipeline=mesh.pipeline, positions=ranks) for n, ranks in holders.items() if len(ranks) > 1}
    parameters: dict[str, ShardedParameter] = {}
    chunks = [
        Stage([task.layers[i] for i in stages[stage]], parameters, number=number, build=False)
        for number, stage in enumerate(held)
    ]
    offloads = config.training.offload_activations and mesh.device.type != "cpu"
    offload = Offload(mesh.device, task.streams) if offloads else None
    data_parallel = DataParallel(
        (_layers(chunk, task, config, mesh, parameters=parameters, offload=offload) for chunk in chunks),
        mesh,
        options=zero_options(task.layers, config, mesh),
        bucket_bytes=int(config.parallel.bucket_size_mb * 2**20),
        separate=frozenset(name for name, numbers in users.items() if len(numbers) > 1),
        stages=held,
    )
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    _check_groups(data_parallel.options.groups, parameters, mesh)
    shared = {name: holders for name, holders in shared.items() if name in parameters}
    tied_copies = frozenset(name for chunk in chunks for name in chunk.tied_copies)
    _spread_values(shared, data_parallel, tied_copies, mesh.device)
    for chunk in chunks:
        chunk.runner = data_parallel if data_parallel.acts_on_layers else None
    return ParallelModel(
        stages=stages,
        chunks=chunks,
        parameters=parameters,
        runtime=PipelineRuntime(
            chunks,
            mesh.pipeline,
            transport=Transport(mesh.pipeline, mesh.device),
            parallel=config.parallel,
            task=task,
            turns=task.turns,
        ),
        data_parallel=data_parallel,
        shared=shared,
        tied_copies=tied_copies,
    )


def _layers(
    chunk: Stage,
    task: Task,
    config: ResolvedConfig,
    mesh: Mesh,
    *,
    parameters: dict[str, ShardedParameter],
    offload: Offload | None,
) -> Iterator[nn.Module]:
    """Build a stage layer by layer, each with its initial values, and wrapped where it keeps only its input. `chunk`: a
    stage that is not built. `parameters`: of the layers so far, by global name; those of this stage are added.
    `offload`: takes the activations of blocks to host memory; None: they stay."""
    is_new = config.checkpoint.load is None  # else every value that learns comes from the checkpoint
    training = config.training
    blocks = [index for index, spec in enumerate(chunk.specs) if spec.is_block]
    recomputed = recomputed_blocks(chunk.specs, config)
    # A plan counts no gain of it, and no messages that GPUs with symmetric memory do not send.
    way = async_tp.way_of(mesh) if config.parallel.async_tp and mesh.backend != "fake" else None
    graph = graphs_of(mesh.device) if training.cuda_graphs else None
    kept = blocks if offload is not None else recomputed if training.distribute_saved_activations else []
    # Built: split over the layer group as it is made.
    for index, layer in enumerate(chunk.build_layers()):
        new = {p.spec.name: p for p in sharded_parameters(layer) if p.spec.name not in parameters}
        # Initialised: by global name, so that every layout starts from the same bits.
        if is_new or (frozen := [one for one in new.values() if not one.requires_grad]):
            task.initialize(new.values() if is_new else frozen)
        if is_new:
            begin_magnitudes(layer)
            task.initialize_buffers({f"{chunk.names[index]}.{name}": each for name, each in layer.named_buffers()})
        parameters |= new
        # Exchanged before compiling, which captures what the layers compute.
        make_reproducible(layer, task.blocks)
        if index in blocks and is_fp8(chunk.specs[index].name, config):
            fp8.exchange(layer, chunk.names[index], config.precision.fp8)
        if way is not None and index in blocks:
            async_tp.exchange(layer, mesh.layer, way)
        if training.compile and index in blocks:
            compile_layer(
                layer,
                backend=training.compile_backend,
                fixed_shapes=chunk.specs[index].block is not None,
                split_backward=training.reproducible or config.parallel.may_split_backward,
            )
        # Recomputation runs the compiled layer again; what is kept in host memory, or divided over the layer group, is
        # then the layer's input only.
        if index in recomputed:
            chunk.layers[index] = Recomputed(layer, task.streams)
        if index in kept:
            group = mesh.layer if training.distribute_saved_activations and index in recomputed else ALONE
            chunk.layers[index] = Kept(chunk.layers[index], offload, group=group, is_first=index == blocks[0])
        # Captured with what is computed again. What lies with the head gets more than hidden states.
        if graph is not None and index in blocks and not chunk.specs[index].with_head:
            chunk.layers[index] = Graphed(chunk.layers[index], graph)
        # Sharded last, by who takes it: its values move into buckets in the precision of training.
        yield chunk.layers[index]


def recomputed_blocks(specs: Sequence[LayerSpec], config: ResolvedConfig) -> list[int]:
    """Numbers of the layers of a stage that keep only their input."""
    if config.training.recompute != "full":
        return []
    blocks = [number for number, spec in enumerate(specs) if spec.is_block]
    return blocks[: config.training.recompute_num_layers]


def _stages_of_tied(layers: Sequence[LayerSpec], stages: Sequence[range]) -> dict[str, set[int]]:
    """For each tied parameter the numbers of the stages that use it."""
    stage_of = {number: stage for stage, numbers in enumerate(stages) for number in numbers}
    number_of = {layer.name: number for number, layer in enumerate(layers)}
    users: dict[str, set[int]] = {}
    for number, layer in enumerate(layers):
        for name in layer.tied.values():
            first = next(i for prefix, i in number_of.items() if name.startswith(f"{prefix}."))
            users.setdefault(name, {stage_of[first]}).add(stage_of[number])
    return users


@torch.no_grad()
def _spread_values(
    shared: Mapping[str, Holders], data_parallel: DataParallel, copies: frozenset[str], device: torch.device
) -> None:
    """Give the copies of tied parameters the value that they have where they are first used. Each has a separate
    bucket, which every stage divides alike, so that ranks need to sum their shards only."""
    for name, holders in sorted(shared.items()):
        for local in data_parallel.segments_of(name):
            value = torch.zeros_like(local.master, device=device) if name in copies else local.master.to(device)
            local.master.copy_(all_reduce_tied_(value.detach(), holders))
        data_parallel.publish_parameter(name)


def zero_options(layers: Sequence[LayerSpec], config: ResolvedConfig, mesh: Mesh) -> ZeroOptions:
    """What data parallelism needs to know of a run."""
    parallel = config.parallel
    return ZeroOptions(
        stage=parallel.zero_stage,
        compute_dtype=DTYPES[config.precision.precision],
        reduce_dtype=DTYPES[config.precision.grad_reduce_dtype],
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        products_add=adds_in_fp32(mesh.device, DTYPES[config.precision.precision]),
        offload=parallel.offload_optimizer,
        offload_params=parallel.offload_params and mesh.device.type != "cpu",
        one_pass=has_one_pass(config, mesh.device),
        optimizer=config.optimizer_settings,
        groups=config.parameter_groups,
        compression=config.precision.grad_reduce_compression,
        exact_terms=_terms(layers, config, mesh) if config.training.reproducible else 0,
    )


def _check_groups(groups: ParameterGroups, parameters: Mapping[str, ShardedParameter], mesh: Mesh) -> None:
    """All ranks call this together. Raises ConfigError on each for rules that are about no parameter of the model."""
    if groups.is_uniform or mesh.backend == "fake":  # the parameters of other ranks are not known then
        return
    names = sorted({name for of_rank in all_gather_objects(list(parameters), mesh.world) for name in of_rank})
    first, last = names[0].partition(".")[0], names[0].rpartition(".")[2]
    problems = [
        f"--param-group {pattern}: no parameter has such a name. Names go from {names[0]} to {names[-1]}: use a "
        f"pattern such as '{first}.*' or '*.{last}'"
        for pattern in groups.unmatched(names)
    ]
    if groups.decoupled and not set(DECOUPLED) & set(names):
        problems.append(f"--decoupled-lr: the model has neither {' nor '.join(DECOUPLED)}: use --param-group")
    if groups.layer_decay < 1 and not any(name.startswith("blocks.") for name in names):
        problems.append("--lr-layer-decay: the model has no blocks: use --param-group, with the names of its layers")
    if problems:
        raise ConfigError(problems)


def _terms(layers: Sequence[LayerSpec], config: ResolvedConfig, mesh: Mesh) -> int:
    """The largest number of gradients of one parameter that a step adds: one per microbatch and use, per canonical
    block and, with sequence parallelism, per rank of the layer group."""
    uses = 1 + max(Counter(name for layer in layers for name in layer.tied.values()).values(), default=0)
    uses += config.model.mtp_num_layers  # of the output layer
    microbatches = config.training.global_batch_size // config.training.micro_batch_size
    return microbatches * uses * max(mesh.layer.size, canonical_blocks(config))
