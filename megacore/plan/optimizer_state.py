"""What the optimizer keeps of the parameters that a rank updates, beside the master weights, and what is padding.

Most optimizers keep as many numbers of every parameter. One that takes matrices whole keeps others of these, and the
ranks that shard have different matrices: the fullest rank decides.
"""

from __future__ import annotations

from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.plan.cut import OnRank
from megacore.plan.once import once_per_state
from megacore.plan.state import updated_parameters
from megacore.plan.whole_matrices import Updated, whole_state


class Kept(NamedTuple):
    """What a rank keeps.

    Attributes:
        moments: bytes of the optimizer's state and of an average of the weights.
        padding: elements of the buckets of whole matrices of all ranks that belong to no parameter, without those of
            experts.
        expert_padding: the same of experts.
    """

    moments: float
    padding: int = 0
    expert_padding: int = 0


@once_per_state
def kept_of_rank(config: ResolvedConfig, on_rank: OnRank, *, on_cpu: bool, number: int | None) -> Kept:
    """What a rank keeps.

    Args:
        config: a resolved configuration.
        on_rank: what it holds.
        on_cpu: whether it computes in host memory.
        number: of the rank in its stage; None: the one that keeps most.
    """
    parameters, experts, settings = on_rank.parameters, on_rank.experts, config.optimizer_settings
    if not settings.takes_some_whole:
        return Kept(updated_parameters(parameters, config, experts=experts) * config.kept_per_parameter)
    whole, others = (settings.bytes_of(whole=kind) + config.average.bytes_per_parameter for kind in (True, False))
    found = whole_state(config, on_rank.chunks, parameters=parameters, experts=experts, on_cpu=on_cpu)

    def moments(updated: Updated) -> float:
        return updated.whole * whole + updated.others * others + updated.factors

    updated = found.updated if number is None else [found.updated[number % len(found.updated)]]
    return Kept(max(map(moments, updated)), found.padding, found.expert_padding)
