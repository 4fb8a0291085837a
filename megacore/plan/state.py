"""What a rank holds from step to step: parameters, gradients and the optimizer's state, by kind.

The shares of ZeRO are those of Rajbhandari et al. 2020 (arXiv 1910.02054, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megacore.config import ParallelConfig, ResolvedConfig, ResolvedExperts, ResolvedModel
from megacore.config.compression import error_bytes
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.reproducible import canonical_blocks
from megacore.models.outline import ModelLayer
from megacore.plan.shared_results import once_per


def state_bytes(
    parameters: int,
    config: ResolvedConfig,
    *,
    experts: int = 0,
    padding: int = 0,
    expert_padding: int = 0,
    moments: float | None = None,
) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer, and of gradients on their way to host memory (`buffers`).

    Args:
        parameters: of a rank's slice of its pipeline stages.
        config: a resolved configuration.
        experts: how many of them are of experts, which fewer ranks hold copies of.
        padding: elements of the buckets of matrices that the optimizer takes whole that belong to no parameter.
        expert_padding: the same of the buckets of experts.
        moments: bytes of the optimizer's state and of an average of the weights, without the master weights; None: as
            many for each parameter.
    """
    compute, stage = ELEMENT_BYTES[config.precision.precision], zero_stage(config)
    summed = 4 if config.training.reproducible else ELEMENT_BYTES[config.precision.grad_reduce_dtype]
    reduce = term_bytes(config)
    # With parameters in host memory the update finds gradients there, and in fp32 the weights themselves.
    copied = config.parallel.offload_optimizer and not config.parallel.offload_params
    master = 4 if copied or compute != 4 else 0
    shard = updated_parameters(parameters, config, experts=experts) + padding / shard_ranks(config.parallel)
    if expert_padding:
        shard += expert_padding / expert_copies(config.parallel)
    held = parameters + padding + expert_padding
    if moments is None:
        moments = shard * config.kept_per_parameter
    return {
        "params": (shard if stage >= 3 else held) * compute,
        "grads": (shard if stage >= 2 else held) * reduce,
        "optimizer": moments + shard * master + error_bytes(config, parameters),
        "buffers": shard * summed if copied else 0.0,
    }


def zero_stage(config: ResolvedConfig) -> int:
    """The stage of ZeRO: 0 where no rank has a replica."""
    return config.parallel.zero_stage if ranks_of_role("replicas", config.parallel) > 1 else 0


def term_bytes(config: ResolvedConfig) -> int:
    """Bytes of a gradient while it is added up."""
    return 8 if config.training.reproducible else ELEMENT_BYTES[config.precision.grad_reduce_dtype]


def updated_parameters(parameters: int, config: ResolvedConfig, *, experts: int = 0) -> float:
    """How many of a rank's parameters it updates: with ZeRO its share of them, else all. Arguments as for
    `state_bytes`."""
    if zero_stage(config) == 0:
        return parameters
    of_experts = experts / expert_copies(config.parallel) if experts else 0.0
    return (parameters - experts) / shard_ranks(config.parallel) + of_experts


def held_experts(config: ResolvedConfig, layers: Iterable[ModelLayer]) -> int:
    """Parameters of experts that a rank holds of some layers."""
    return sum(routed_parameters(config, layer.block) for layer in layers)


def whole_parameters(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> int:
    """Of the whole model, a tied one counted once."""
    tables = config.model.vocab_size * config.model.hidden_size if config.model.vocab_size else 0
    tied = (tables if layer.held is not None else layer.shared for layer in layers if layer.tied)
    return sum(layer.parameters for layer in layers) - sum(tied)


def held_by_layer(chunks: Sequence[Sequence[ModelLayer]]) -> list[list[int]]:
    """Parameters that a rank holds of each layer of each stage, padding included; those that two of its layers share
    are the first's."""
    names: set[str] | None = None
    seen = set[str]()  # tied parameters, of which the rank has a copy, or the first

    def held(layer: ModelLayer) -> int:
        nonlocal names
        count = layer.parameters if layer.held is None else layer.held
        if not layer.tied:
            return count
        if names is None:
            names = {layer.name for chunk in chunks for layer in chunk}
        owners = layer.tied.values()
        is_shared = any(owner.startswith(f"{name}.") for owner in owners for name in names - {layer.name})
        is_shared = is_shared or not seen.isdisjoint(owners)
        seen.update(owners)
        return count - layer.shared if is_shared else count

    return [[held(layer) for layer in chunk] for chunk in chunks]


def building_bytes(
    config: ResolvedConfig, state: Mapping[str, float], layers: Iterable[ModelLayer], *, moments: float
) -> float:
    """What exists when the last layer has been made: parameters and master weights, unless they are in host memory, and
    on stage 3 that layer whole.

    Args:
        config: a resolved configuration.
        state: of the rank, by kind.
        layers: that it holds.
        moments: how much of the optimizer's part is not master weights.
    """
    replicas = ranks_of_role("replicas", config.parallel)
    master = 0.0
    if config.precision.precision != "fp32" and not config.parallel.offload_optimizer:
        master = state["optimizer"] - held_errors(config, state) - moments
    divides = replicas > 1 and config.parallel.zero_stage == 3
    whole = 0.0
    if divides or config.parallel.offload_params:
        held = (layer.parameters if layer.held is None else layer.held for layer in layers)
        whole = 4.0 * max(held, default=0)
    if config.parallel.offload_params:
        return whole + held_errors(config, state)
    return state["params"] + master + whole + held_errors(config, state)


def held_errors(config: ResolvedConfig, state: Mapping[str, float]) -> float:
    """Bytes of the compression's errors among `state_bytes`: they lie on the device, from the beginning."""
    parameters = state["params"] / ELEMENT_BYTES[config.precision.precision]
    return error_bytes(config, parameters * (shard_ranks(config.parallel) if zero_stage(config) == 3 else 1))


def late_bytes(config: ResolvedConfig, moments: float, *, on_cpu: bool) -> float:
    """The optimizer's state without master weights, in a run of one step: it is made after the first backward."""
    if config.training.train_iters > 1 or config.checkpoint.load is not None:
        return 0.0
    if config.parallel.offload_optimizer and not on_cpu:
        return 0.0  # in host memory
    return moments


def forgets_gradients(config: ResolvedConfig) -> bool:
    """Whether no buffer of gradients outlives a step."""
    if ranks_of_role("replicas", config.parallel) == 1:
        return config.precision.precision == config.precision.grad_reduce_dtype and not config.training.reproducible
    return zero_stage(config) >= 2


# ---- experts ---------------------------------------------------------------------------------------------------------
# Which experts a token uses is known only when it is there. Everything is planned as if all experts had the same number
# of tokens: a rank then computes as many rows as its tokens have choices. The busiest rank of a real step has more, by
# the `moe/max_violation` that a run logs. Legend: t tokens that a rank routes, k experts of a token, R = t k rows, h
# hidden size, f inner width of an expert on a rank, E experts, e bytes of an element.

_INDEX, _FP32 = 8, 4  # bytes


@dataclass(frozen=True, kw_only=True)
class ExpertShare:
    """A rank's part of the experts of a block, in one microbatch.

    Attributes:
        experts: the section of the block.
        scored: tokens whose router this rank computes.
        tokens: t, those that it sends to experts.
        held: experts that it holds, whole or in part.
        inner: f.
        hidden: h.
        matrices: of an expert.
    """

    experts: ResolvedExperts
    scored: float
    tokens: float
    held: int
    inner: int
    hidden: int
    matrices: int

    @property
    def chosen(self) -> int:
        """k."""
        return self.experts.moe_router_topk

    @property
    def rows(self) -> float:
        """R, of all experts together."""
        return self.tokens * self.chosen

    @property
    def matrix(self) -> int:
        """Weights of one of the layers of all experts that the rank holds."""
        return self.held * self.hidden * self.inner


@once_per("layers")
def expert_share(config: ResolvedConfig, block: ResolvedModel) -> ExpertShare | None:
    """The part of one rank; None where the block has no experts."""
    experts, parallel = block.experts, config.parallel
    if experts is None:
        return None
    tokens = float(config.training.micro_batch_size * config.rank_positions)
    split = ranks_of_role("layer", parallel)
    scored = tokens / (split if parallel.sequence_parallel else 1)
    # The ranks that split an expert gather each other's positions; with canonical blocks all do.
    gathered = scored * (parallel.expert_split if parallel.sequence_parallel else 1)
    if canonical_blocks(config) > 1:
        gathered = float(config.training.micro_batch_size * config.data.seq_length)
    return ExpertShare(
        experts=experts,
        scored=scored,
        tokens=gathered,
        held=experts.num_experts // parallel.ep,
        inner=experts.moe_ffn_hidden_size // parallel.expert_split,
        hidden=block.hidden_size,
        matrices=3 if block.gated else 2,
    )


def expert_copies(parallel: ParallelConfig) -> int:
    """The ranks that hold the same experts: dp x cp x tp / (ep x etp)."""
    stage = ranks_of_role("replicas", parallel) * ranks_of_role("layer", parallel)
    return stage // (parallel.ep * parallel.expert_split)


@once_per("layers")
def routed_parameters(config: ResolvedConfig, block: ResolvedModel | None) -> int:
    """Parameters of experts that a rank holds of a block."""
    share = None if block is None else expert_share(config, block)
    return 0 if share is None else share.matrices * share.matrix
