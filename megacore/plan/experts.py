"""A block's experts on one rank, for the planner: how many rows they compute, what they keep, and what they send.

Which experts a token uses is known only when it is there. Everything is planned as if all experts had the same number
of tokens: a rank then computes as many rows as its tokens have choices. The busiest rank of a real step has more, by
the `moe/max_violation` that a run logs.

What is counted is what layers/moe.py and parallel/experts.py do. Legend: t tokens that a rank routes, k experts of a
token, R = t k rows, h hidden size, f inner width of an expert on a rank, E experts, e bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacore.config import ParallelConfig, ResolvedConfig, ResolvedExperts, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.config.reproducible import canonical_blocks
from megacore.plan.once import once_per_layers

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


@once_per_layers
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


@once_per_layers
def routed_parameters(config: ResolvedConfig, block: ResolvedModel | None) -> int:
    """Parameters of experts that a rank holds of a block."""
    share = None if block is None else expert_share(config, block)
    return 0 if share is None else share.matrices * share.matrix
