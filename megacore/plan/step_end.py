"""What follows the last backward of a step: exposed reductions and gathering between replicas, the update of the
weights, and the copies of offloading that computing does not hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.plan.cut import Cut, OnRank
from megacore.plan.offload_time import OffloadTime, offload_time
from megacore.plan.optimizer_state import kept_of_rank
from megacore.plan.orthogonal_time import orthogonal_seconds
from megacore.plan.stage_time import Speed, StageTime, rank_replicas
from megacore.plan.state import updated_parameters
from megacore.plan.traffic import update_traffic


class StepEnd(NamedTuple):
    """Seconds of a rank: what follows its last backward, and what its offloading adds to a step.

    Attributes:
        exposed: transfers between replicas that nothing hides.
        hidden: those beside the last backward and the next forward.
        optimizer: the update.
        host: copies to and from host memory that computing does not hide.
        host_hidden: those that it hides.
    """

    exposed: float
    hidden: float
    optimizer: float
    host: float
    host_hidden: float

    @property
    def seconds(self) -> float:
        return self.exposed + self.optimizer + self.host


def step_ends(config: ResolvedConfig, cut: Cut, stages: Sequence[StageTime], speed: Speed) -> Iterator[StepEnd]:
    """The end of a step on each pipeline rank, without ranks whose stages are those of one before.

    Args:
        config: a resolved configuration.
        cut: the model in stages.
        stages: the times of each stage.
        speed: of the device.
    """
    pp, seen = config.parallel.pp, set()
    for rank in range(pp):
        on_rank = stages[rank::pp]
        if (alike := tuple(map(id, on_rank))) not in seen:
            seen.add(alike)
            yield _step_end(config, cut.on_rank(config, rank), on_rank, speed)


def _step_end(config: ResolvedConfig, held: OnRank, stages: Sequence[StageTime], speed: Speed) -> StepEnd:
    """Reduction, update and gathering, as far as the last backward and the next forward do not hide them."""
    parallel = config.parallel
    parameters = held.parameters
    both = rank_replicas(config, parameters, experts=held.experts)
    sums = [one.gradients for one in both if one.gradients is not None and parallel.zero_stage < 2]
    gathered = [one.parameters for one in both if one.parameters is not None and parallel.zero_stage < 3]
    reduce, gather = speed.transfers(sums), speed.transfers(gathered)
    across = speed.transfers(one.across for one in both if one.across is not None)  # nothing hides it
    across += speed.transfers(update_traffic(config, held.chunks))
    # A quarter of the buckets, the first layers', is reduced when backward is done; the rest beside it.
    backward = sum(stage.passes.input_grad.compute + stage.passes.weight_grad.compute for stage in stages)
    forward = sum(stage.passes.forward.compute for stage in stages)
    beside = speed.software.overlaps_replicas and speed.overlaps
    hidden_reduce = min(0.75 * reduce, backward) if beside and parallel.overlap_grad_reduce else 0.0
    hidden_gather = min(0.75 * gather, forward) if beside and parallel.overlap_param_gather else 0.0
    shard = updated_parameters(parameters, config, experts=held.experts)
    moments = kept_of_rank(config, held, on_cpu=speed.cluster.on_cpu, number=None).moments
    moved = 2 * moments + shard * (8 + 2 * 4 + speed.element) + parameters * 4.0  # and gradients set to zero
    device, computing = speed.cluster.device, sum(stage.sum.total for stage in stages)
    host = OffloadTime()
    if not speed.cluster.on_cpu:
        host = offload_time(config, held.chunks, device, speed.case, shard=shard, moved=moved, computing=computing)
    return StepEnd(
        exposed=reduce + gather + across - hidden_reduce - hidden_gather,
        hidden=hidden_reduce + hidden_gather,
        optimizer=(host.update or speed.memory(moved)) + orthogonal_seconds(config, held.chunks, speed),
        host=host.exposed,
        host_hidden=host.hidden,
    )
