"""What follows the last backward of a step: exposed reductions and gathering between replicas, the update of the
weights, and the copies of offloading that computing does not hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.plan.cut import Cut, OnRank
from megacore.plan.offload_time import OffloadTime, offload_time
from megacore.plan.once import once_per_state
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
    pp = config.parallel.pp
    for rank in cut.unlike_ranks:
        yield _step_end(config, cut.on_rank(config, rank), stages[rank::pp], speed)


class _Update(NamedTuple):
    """What follows the last backward of a rank if nothing hides it.

    Attributes:
        reduce, gather: seconds of reductions of gradients, and of gathering parameters.
        across: seconds of transfers that nothing hides.
        shard: parameters that the rank updates.
        moved: bytes that the update reads and writes.
        update: seconds of reading and writing them.
        orthogonal: seconds of making directions orthogonal.
    """

    reduce: float
    gather: float
    across: float
    shard: float
    moved: float
    update: float
    orthogonal: float


@once_per_state
def _update(config: ResolvedConfig, held: OnRank, speed: Speed) -> _Update:
    parallel, parameters = config.parallel, held.parameters
    both = rank_replicas(config, parameters=parameters, experts=held.experts)
    sums = [one.gradients for one in both if one.gradients is not None and parallel.zero_stage < 2]
    gathered = [one.parameters for one in both if one.parameters is not None and parallel.zero_stage < 3]
    across = speed.transfers(one.across for one in both if one.across is not None)
    across += speed.transfers(update_traffic(config, held.chunks))
    shard = updated_parameters(parameters, config, experts=held.experts)
    moments = kept_of_rank(config, held, on_cpu=speed.cluster.on_cpu, number=None).moments
    moved = 2 * moments + shard * (8 + 2 * 4 + speed.element) + parameters * 4.0  # and gradients set to zero
    return _Update(
        reduce=speed.transfers(sums),
        gather=speed.transfers(gathered),
        across=across,
        shard=shard,
        moved=moved,
        update=speed.memory(moved),
        orthogonal=orthogonal_seconds(config, held.chunks, speed),
    )


def _step_end(config: ResolvedConfig, held: OnRank, stages: Sequence[StageTime], speed: Speed) -> StepEnd:
    """Reduction, update and gathering, as far as the last backward and the next forward do not hide them."""
    parallel, update = config.parallel, _update(config, held, speed)
    # A quarter of the buckets, the first layers', is reduced when backward is done; the rest beside it.
    forward, backward = (sum(seconds) for seconds in zip(*(stage.computing for stage in stages), strict=True))
    beside = speed.software.overlaps_replicas and speed.overlaps
    hidden_reduce = min(0.75 * update.reduce, backward) if beside and parallel.overlap_grad_reduce else 0.0
    hidden_gather = min(0.75 * update.gather, forward) if beside and parallel.overlap_param_gather else 0.0
    device, computing = speed.cluster.device, sum(stage.total for stage in stages)
    host = OffloadTime()
    if not speed.cluster.on_cpu:
        sizes = {"shard": update.shard, "moved": update.moved}
        host = offload_time(config, held.chunks, device, speed.case, **sizes, computing=computing)
    return StepEnd(
        exposed=update.reduce + update.gather + update.across - hidden_reduce - hidden_gather,
        hidden=hidden_reduce + hidden_gather,
        optimizer=(host.update or update.update) + update.orthogonal,
        host=host.exposed,
        host_hidden=host.hidden,
    )
