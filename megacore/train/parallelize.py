"""The recipe: from the description of a model to this rank's part of it, ready to train. The order is the knowledge.

1. partition: which layers this stage holds (uneven counts are balanced, nothing is dropped);
2. build: only those layers, split over the tensor-parallel group as they are made;
3. initialise: by global name, so that every layout starts from the same bits;
4. recompute: wrap the blocks that keep only their input;
5. data parallel: move the parameters as they now stand into buckets, in the precision of training, and divide them by
   ZeRO's stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megacore.config import Config, known
from megacore.models.initialize import initialize
from megacore.models.spec import LayerSpec
from megacore.optim.bucket import ZeroOptions
from megacore.optim.data_parallel import DataParallel
from megacore.optim.precision import DTYPES
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams
from megacore.parallel.recompute import Recomputed
from megacore.pipeline.partition import partition
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.stage import Stage
from megacore.pipeline.transport import Transport


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: a model's layers, how a microbatch enters them, and the loss that comes out.

    Attributes:
        layers: the whole model, described.
        first_input: microbatch -> input of the first layer.
        loss: (output of the last layer, microbatch) -> loss summed over the microbatch's tokens.
        eval_loss: what evaluations report instead; None: `loss`.
        streams: where the layers' dropout masks come from.
    """

    layers: Sequence[LayerSpec]
    first_input: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    streams: RandomStreams
    eval_loss: Callable[[Tensor, Any], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """This rank's part of the model.

    Attributes:
        stages: which layers every pipeline stage holds.
        stage: this rank's layers.
        runtime: runs microbatches through the pipeline.
        data_parallel: divides parameters, gradients and optimizer state over data-parallel ranks.
        shared: global names of parameters that the first and the last stage both hold.
    """

    stages: list[range]
    stage: Stage
    runtime: PipelineRuntime
    data_parallel: DataParallel
    shared: frozenset[str]


def parallelize(task: Task, config: Config, mesh: Mesh) -> ParallelModel:
    """Build this rank's stage and everything that makes it take part in the whole.

    Args:
        task: what is trained.
        config: resolved.
        mesh: this rank's place.
    """
    stages = partition(task.layers, mesh.pp.size)
    stage = Stage([task.layers[i] for i in stages[mesh.pp.rank]])
    parameters = stage.by_name()
    initialize(parameters.values(), config.model, seed=config.training.seed)

    tied = {name for layer in task.layers for name in layer.tied.values()} if mesh.pp.size > 1 else set()
    shared = frozenset(tied & parameters.keys())
    if config.training.recompute == "full":
        blocks = [i for i, number in enumerate(stages[mesh.pp.rank]) if task.layers[number].is_block]
        for i in blocks[: config.training.recompute_num_layers]:
            stage.layers[i] = Recomputed(stage.layers[i], task.streams)

    parallel, dtype = config.parallel, DTYPES[config.precision.precision]
    data_parallel = DataParallel(
        list(stage.layers),
        mesh.dp,
        options=ZeroOptions(
            stage=parallel.zero_stage,
            compute_dtype=dtype,
            reduce_dtype=DTYPES[config.precision.grad_reduce_dtype],
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            offload=parallel.offload_optimizer,
            exact_terms=_terms(config) if config.training.reproducible else 0,
        ),
        bucket_bytes=int(parallel.bucket_size_mb * 2**20),
        alone=shared,
    )
    stage.run_layer = data_parallel.run_layer
    positions = config.data.seq_length // (mesh.tp.size if parallel.sequence_parallel else 1)
    boundary = (config.training.micro_batch_size, positions, config.model.hidden_size)
    runtime = PipelineRuntime(
        stage,
        mesh.pp,
        transport=Transport(mesh.pp, boundary, dtype=dtype, device=mesh.device),
        streams=task.streams,
        first_input=task.first_input,
        loss=task.loss,
        eval_loss=task.eval_loss,
    )
    return ParallelModel(stages=stages, stage=stage, runtime=runtime, data_parallel=data_parallel, shared=shared)


def _terms(config: Config) -> int:
    """How many gradients of one parameter a step adds up at most: one a microbatch and use, and with sequence
    parallelism one a tensor-parallel rank."""
    uses = 2  # of a tied embedding
    microbatches = known(config.training.global_batch_size) // config.training.micro_batch_size
    return microbatches * uses * config.parallel.tp
