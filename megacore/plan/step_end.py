"""What follows the last backward of a step: exposed reductions and gathering between replicas, the update of the
weights, and the copies of offloading that computing does not hide."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.precision import ELEMENT_BYTES
from megacore.models.outline import ModelLayer
from megacore.plan.activations import product_input_bytes
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Case, Device
from megacore.plan.memory import kept_of_rank, of_layers
from megacore.plan.shared_results import once_per
from megacore.plan.stage_time import Speed, StageTime, rank_replicas
from megacore.plan.stages import RankStages, StagedModel
from megacore.plan.state import term_bytes, updated_parameters
from megacore.plan.traffic import update_traffic
from megacore.plan.whole_matrices import Product, busiest_seconds


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


def step_ends(
    config: ResolvedConfig, staged: StagedModel, stages: Sequence[StageTime], speed: Speed
) -> Iterator[StepEnd]:
    """The end of a step on each pipeline rank, without ranks whose stages are those of one before.

    Args:
        config: a resolved configuration.
        staged: the model in stages.
        stages: the times of each stage.
        speed: of the device.
    """
    for rank in staged.unlike_ranks:
        held = [stages[number] for number in staged.placement.stages_of(rank)]
        yield _step_end(config, staged.on_rank(config, rank), held, speed)


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


@once_per("state")
def _update(config: ResolvedConfig, held: RankStages, speed: Speed) -> _Update:
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


def _step_end(config: ResolvedConfig, held: RankStages, stages: Sequence[StageTime], speed: Speed) -> StepEnd:
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
        host = offload_time(config, held, device, speed.case, **sizes, computing=computing)
    return StepEnd(
        exposed=update.reduce + update.gather + update.across - hidden_reduce - hidden_gather,
        hidden=hidden_reduce + hidden_gather,
        optimizer=(host.update or update.update) + update.orthogonal,
        host=host.exposed,
        host_hidden=host.hidden,
    )


# ---- the update of matrices by Newton-Schulz (optim/muon.py) ------------------------------------------------
# A step of an m x n matrix X, m <= n, has three products: X X^T, its square, and their polynomial times X, together
# 4 m^2 n + 2 m^3 FLOPs. The rank that computes most decides, as replicas wait for it.

# Around the iteration each element is written in fp32 as a direction, read, and written in the format of the products;
# there it is read for the norm, read and written by the division, and read by the update.
_FP32_PASSES, _NARROW_PASSES = 2, 5


def orthogonal_seconds(config: ResolvedConfig, chunks: Sequence[Sequence[ModelLayer]], speed: Speed) -> float:
    """Seconds of the products of a step's update on the busiest rank; 0 with an optimizer that has none.

    Args:
        config: a resolved configuration.
        chunks: the layers of each stage of a pipeline rank.
        speed: of the device, in the format of the model.
    """
    if not config.optimizer_settings.newton_schulz_steps:
        return 0.0
    element = config.optimizer_settings.direction_bytes(config.precision.precision)
    peak = speed.peak
    if (form := "fp32" if element == 4 else "bf16") != config.precision.precision:
        peak = speed.cluster.peak(form) or peak
    return _on_busiest(config, chunks, speed.cluster, case=speed.case, peak=peak, element=element)


@once_per("state")
def _on_busiest(
    config: ResolvedConfig,
    chunks: Sequence[Sequence[ModelLayer]],
    cluster: Cluster,
    *,
    case: Case,
    peak: float,
    element: int,
) -> float:
    steps, speed = config.optimizer_settings.newton_schulz_steps, Speed(cluster, case, peak, element)

    @functools.cache
    def seconds(product: Product) -> float:
        return _seconds(product, steps, speed)

    return busiest_seconds(config, chunks, seconds, on_cpu=cluster.on_cpu)


def _seconds(product: Product, steps: int, speed: Speed) -> float:
    """Of the directions of matrices of one shape, computed together."""
    m, n = sorted((product.rows, product.columns))
    products = (speed.product(m, n, m), speed.product(m, m, m), speed.product(m, m, n))
    added = speed.memory(speed.element * (m * m + m * n))  # what the second and the third product are added to
    step = sum(products) + added - 3 * speed.launch
    around = speed.memory((4 * _FP32_PASSES + speed.element * _NARROW_PASSES) * m * n)
    return product.number * (steps * step + around) + 3 * steps * speed.launch


# ---- offloading ------------------------------------------------------------------------------------------------------
# Copies to the device and from it pass the host's link at the same time. Those of a microbatch go beside its
# computation, which hides them as far as it is as long (Ren et al. 2021, arXiv 2101.06840, section 4; Rajbhandari et
# al. 2021, arXiv 2104.07857, section 6).


class OffloadTime(NamedTuple):
    """Seconds of a step.

    Attributes:
        update: of weights and optimizer state in host memory, with the copies that it waits for.
        exposed: copies of parameters, gradients and activations that computing does not hide.
        hidden: those that it hides.
    """

    update: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0


def offload_time(
    config: ResolvedConfig,
    held: RankStages,
    device: Device,
    case: Case,
    *,
    shard: float,
    moved: float,
    computing: float,
) -> OffloadTime:
    """What offloading takes of a step of one rank of devices with a memory of their own.

    Args:
        config: a resolved configuration.
        held: what the rank holds.
        device: that computes.
        case: which of its assumed values.
        shard: parameters that the rank updates.
        moved: bytes that their update reads and writes.
        computing: seconds of the computations of one microbatch.
    """
    if not config.offloads:
        return OffloadTime()
    link = device.host_link * device.link_efficiency.of(case)
    gradients, parameters = term_bytes(config) * shard, ELEMENT_BYTES[config.precision.precision] * shard
    m, to_device, to_host, alone, after, update = config.microbatches, 0.0, 0.0, 0.0, 0.0, 0.0
    if config.parallel.offload_optimizer:
        update = moved / (device.host_bandwidth * device.memory_efficiency.of(case))
    if config.parallel.offload_params:
        # Parameters before forward and before backward; the sum so far, of all microbatches but the first.
        to_device += 2 * parameters + gradients * (m - 1) / m
        to_host += gradients
        after = gradients / link  # they are fetched once more for their norm
    elif config.parallel.offload_optimizer:  # bucket by bucket, beside the update
        update = max(update, gradients / link, parameters / link)
    if config.training.offload_activations:
        kept = sum(of_layers(config, held, on_cpu=False).on_host)
        to_device, to_host = to_device + kept, to_host + kept
        if config.parallel.may_split_backward:  # the inputs of products come once more, each while its product waits
            blocks = (layer.block for chunk in held.chunks for layer in chunk if layer.block is not None)
            alone = sum(product_input_bytes(config, block) for block in blocks)
    copies = max(to_device, to_host) / link
    exposed = max(copies - computing, 0.0) + alone / link
    copies += alone / link
    return OffloadTime(update=update, exposed=m * exposed + after, hidden=m * (copies - exposed))
