"""The recipe: from the description of a model to this rank's part of it, ready to train. The order is the knowledge.

1. partition: which layers this stage holds (uneven counts are balanced, nothing is dropped);
2. build: only those layers, split over the tensor-parallel group as they are made;
3. initialise: by global name, so that every layout starts from the same bits, and copies of tied parameters alike;
4. recompute: wrap the blocks that keep only their input;
5. data parallel: move the parameters as they now stand into buckets, in the precision of training, and divide them by
   ZeRO's stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config import Config, ParallelConfig, known
from megacore.config.pipeline_layout import parse_layout
from megacore.data.loading.batch import Batch
from megacore.data.loading.loader import Microbatch
from megacore.models.initialize import initialize
from megacore.models.spec import LayerSpec, Terms
from megacore.optim.precision import DTYPES
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Group, Mesh, along_pipeline
from megacore.parallel.random import RandomStreams
from megacore.parallel.recompute import Recomputed
from megacore.parallel.sharding import ShardedParameter
from megacore.pipeline.actions import Schedule
from megacore.pipeline.partition import partition
from megacore.pipeline.runtime import Forms, PipelineRuntime
from megacore.pipeline.schedule import build_schedule
from megacore.pipeline.schedule_file import load_schedule
from megacore.pipeline.stage import Stage
from megacore.pipeline.transport import TensorForm, Transport
from megacore.zero.bucket import ZeroOptions
from megacore.zero.data_parallel import DataParallel


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: a model's layers, how a microbatch enters them, and the loss that comes out.

    Attributes:
        layers: the whole model, described.
        first_input: microbatch -> input of the first layer.
        loss: (output of the last layer, microbatch) -> loss summed over the microbatch's tokens, or several sums.
        terms: what the loss consists of: its sums' names and counts.
        eval_loss: what evaluations report instead; None: `loss`.
        eval_terms: what `eval_loss` consists of; None: `terms`. Those with a name of `terms` make up the reported loss.
        streams: where the layers' dropout masks come from.
        initialize: gives a rank's parameters their values; None: by global name, as the configuration says.
        forms: microbatch -> what every stage receives; None: hidden states of the configured shape.
        batch_type: what a microbatch is.
        flops: operations of one sequence, forward and backward; None: those of a GPT of the configured shape.
        carries_documents: whether document numbers, int64 [b, s], travel beside the hidden states.
    """

    layers: Sequence[LayerSpec]
    first_input: Callable[[Any], Any]
    loss: Callable[[Any, Any], Tensor]
    streams: RandomStreams
    terms: Terms = field(default_factory=Terms)
    eval_loss: Callable[[Any, Any], Tensor] | None = None
    eval_terms: Terms | None = None
    initialize: Callable[[Iterable[ShardedParameter]], None] | None = None
    forms: Callable[[Any], Forms] | None = None
    batch_type: type[Batch] = Microbatch
    flops: float | None = None
    carries_documents: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """This rank's part of the model.

    Attributes:
        stages: which layers every pipeline stage holds.
        chunks: this rank's stages.
        parameters: of this rank, by global name.
        runtime: runs microbatches through the pipeline.
        data_parallel: divides parameters, gradients and optimizer state over data-parallel ranks.
        shared: global names of tied parameters that other ranks hold too, and the group of their holders.
        tied_copies: those of them whose first use lies on another rank.
    """

    stages: list[range]
    chunks: list[Stage]
    parameters: dict[str, ShardedParameter]
    runtime: PipelineRuntime
    data_parallel: DataParallel
    shared: dict[str, Group]
    tied_copies: frozenset[str]


def parallelize(task: Task, config: Config, mesh: Mesh) -> ParallelModel:
    """Build this rank's stages and everything that makes them take part in the whole.

    Args:
        task: what is trained.
        config: resolved.
        mesh: this rank's place.
    """
    stages = stage_ranges(task.layers, config.parallel)
    own = stages[mesh.pp.rank :: mesh.pp.size]
    chunks: list[Stage] = []
    parameters: dict[str, ShardedParameter] = {}
    for numbers in own:
        chunks.append(Stage([task.layers[i] for i in numbers], parameters))
        parameters |= chunks[-1].by_name()
    fill = task.initialize or partial(initialize, config=config.model, seed=config.training.seed)
    fill(parameters.values())
    tied_copies = frozenset(name for chunk in chunks for name in chunk.tied_copies)
    shared = _groups_of_holders(task.layers, stages, mesh, parameters)
    _spread_values(shared, parameters, tied_copies)
    if config.training.recompute == "full":
        _recompute_blocks(chunks, own, task, config.training.recompute_num_layers)
    data_parallel = DataParallel(
        [list(chunk.layers) for chunk in chunks],
        mesh.dp,
        options=_zero_options(task.layers, config),
        bucket_bytes=int(config.parallel.bucket_size_mb * 2**20),
        alone=frozenset(shared),
    )
    for number, chunk in enumerate(chunks):
        chunk.run_layer = partial(data_parallel.run_layer, number)
    return ParallelModel(
        stages=stages,
        chunks=chunks,
        parameters=parameters,
        runtime=_runtime(chunks, task, config, mesh),
        data_parallel=data_parallel,
        shared=shared,
        tied_copies=tied_copies,
    )


def stage_ranges(layers: Sequence[LayerSpec], config: ParallelConfig) -> list[range]:
    """Which layers every stage of the model holds: as laid out by hand, or balanced."""
    count = config.pp * config.virtual_stages
    if config.pipeline_layout is not None:
        return parse_layout(config.pipeline_layout, stages=count, blocks=sum(layer.is_block for layer in layers))
    return partition(layers, count, config.pipeline_balance)


def _groups_of_holders(
    layers: Sequence[LayerSpec], stages: Sequence[range], mesh: Mesh, parameters: Mapping[str, ShardedParameter]
) -> dict[str, Group]:
    """For each tied parameter of this rank that other ranks of the pipeline hold too: who holds it."""
    rank_of = {number: stage % mesh.pp.size for stage, numbers in enumerate(stages) for number in numbers}
    number_of = {layer.name: number for number, layer in enumerate(layers)}
    holders: dict[str, set[int]] = {}
    for number, layer in enumerate(layers):
        for name in layer.tied.values():
            first = next(i for prefix, i in number_of.items() if name.startswith(f"{prefix}."))
            holders.setdefault(name, {rank_of[first]}).add(rank_of[number])
    groups = {name: along_pipeline(mesh, sorted(ranks)) for name, ranks in holders.items() if len(ranks) > 1}
    return {name: group for name, group in groups.items() if name in parameters}


@torch.no_grad()
def _spread_values(
    shared: Mapping[str, Group], parameters: Mapping[str, ShardedParameter], copies: frozenset[str]
) -> None:
    """Give the copies of tied parameters the value that they have where they are first used."""
    for name, group in sorted(shared.items()):
        if name in copies:
            parameters[name].zero_()
        all_reduce_(parameters[name].data, group)


def _recompute_blocks(chunks: Sequence[Stage], own: Sequence[range], task: Task, first: int | None) -> None:
    for chunk, numbers in zip(chunks, own, strict=True):
        blocks = [i for i, number in enumerate(numbers) if task.layers[number].is_block]
        for i in blocks[:first]:
            chunk.layers[i] = Recomputed(chunk.layers[i], task.streams)


def _zero_options(layers: Sequence[LayerSpec], config: Config) -> ZeroOptions:
    parallel = config.parallel
    return ZeroOptions(
        stage=parallel.zero_stage,
        compute_dtype=DTYPES[config.precision.precision],
        reduce_dtype=DTYPES[config.precision.grad_reduce_dtype],
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        offload=parallel.offload_optimizer,
        exact_terms=_terms(layers, config) if config.training.reproducible else 0,
    )


def _runtime(chunks: Sequence[Stage], task: Task, config: Config, mesh: Mesh) -> PipelineRuntime:
    parallel = config.parallel
    between = _between_stages(config, documents=task.carries_documents)
    forms: Forms = [None, *[between] * (mesh.pp.size * len(chunks) - 1)]
    return PipelineRuntime(
        chunks,
        mesh.pp,
        transport=Transport(mesh.pp, mesh.device),
        forms=task.forms or (lambda _: forms),
        schedule=lambda microbatches: _schedule(parallel, microbatches),
        streams=task.streams,
        first_input=task.first_input,
        loss=task.loss,
        loss_shape=task.terms.shape,
        eval_loss=task.eval_loss,
        eval_shape=(task.eval_terms or task.terms).shape,
    )


def _between_stages(config: Config, *, documents: bool) -> tuple[TensorForm, ...]:
    """What a block of the configured shape takes and gives."""
    batch, length = config.training.micro_batch_size, config.data.seq_length
    positions = length // (config.parallel.tp if config.parallel.sequence_parallel else 1)
    hidden = TensorForm((batch, positions, config.model.hidden_size), DTYPES[config.precision.precision])
    return (hidden, TensorForm((batch, length), torch.int64)) if documents else (hidden,)


def _schedule(parallel: ParallelConfig, microbatches: int) -> Schedule:
    if parallel.schedule_csv is not None:
        return load_schedule(Path(parallel.schedule_csv))
    return build_schedule(parallel.schedule, parallel.pp, microbatches, parallel.virtual_stages)


def _terms(layers: Sequence[LayerSpec], config: Config) -> int:
    """How many gradients of one parameter a step adds up at most: one a microbatch and use, and with sequence
    parallelism one a tensor-parallel rank."""
    uses = 1 + max(Counter(name for layer in layers for name in layer.tied.values()).values(), default=0)
    microbatches = known(config.training.global_batch_size) // config.training.micro_batch_size
    return microbatches * uses * config.parallel.tp
