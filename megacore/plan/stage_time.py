"""How long one microbatch takes in a stage, in closed form: products, attention, memory and the layers' transfers.

Unlike roofline.py nothing is executed: each layer's operators follow from its configuration. A matrix product takes
its FLOPs at the share of the peak that large products reach, and its bytes at the memory's bandwidth, one after the
other: a smooth roofline (Williams et al. 2009), by which narrow and short products are slower without a further
constant. Transfers take the time of roofline.transfer_seconds.

Shape legend: tokens b s of a microbatch, e bytes of an element, t tensor-parallel ranks, k n factors of a product.
"""

from __future__ import annotations

import functools
import operator
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.config.logits import head_has_loss
from megacore.config.precision import ELEMENT_BYTES
from megacore.models.outline import ModelLayer
from megacore.models.size import attention_matrices, short_matrices, vocabulary_rows
from megacore.pipeline.layer_time import HEAD_PASSES, LOGIT_PASSES, RESIDUAL_PASSES, chunk_flops, linear_bytes
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Case
from megacore.plan.shared_results import once_per
from megacore.plan.software import Software
from megacore.plan.state import expert_share, held_by_layer, held_experts
from megacore.plan.traffic import ReplicaTraffic, Sent, layer_traffic, recomputed_whole, replica_traffic, weights_apart

_OPERATORS_FORWARD, _OPERATORS_BACKWARD = 16, 28  # launched per block, without fused ones
# Unfused attention's tensors [b, n/t, s, s]. Forward: scores written, read and written by the softmax, read by the mix.
# Backward: weights read for the values' gradients, and their own gradients written; those and the weights read by the
# softmax, which writes the scores' gradients; these read for the queries' and for the keys'. Dropout reads and writes
# them once more in each, with a mask of a byte.
_SCORES_FORWARD, _SCORES_BACKWARD, _DROPOUT_PASSES = 4.0, 7.0, 2.5
# Of an fp32 copy of the logits, beside reading the logits and writing their gradients. Forward: the copy written, read
# for its maximum, read and written to subtract that, for the exponentials and for the quotients, read for their sum.
# Backward: read and written to multiply by the loss's gradient, read for the gradients. As in Megatron-Core's
# tensor_parallel/cross_entropy.py; torch's cross_entropy moves as much in all.
_COPY_FORWARD, _COPY_BACKWARD = 9.0, 3.0


class Parts(NamedTuple):
    """Seconds of a rank, by what takes them; `dispatch` is the exchange of rows between experts, `exposed` the other
    transfers, and `hidden` is beside the others and not in the total."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    exposed: float = 0.0
    dispatch: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: object) -> Parts:
        assert isinstance(other, Parts)
        return Parts(*map(operator.add, self, other))

    def times(self, factor: float) -> Parts:
        return Parts(*[factor * part for part in self])

    @property
    def compute(self) -> float:
        return self.gemm + self.attention + self.memory

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.dispatch


class Passes(NamedTuple):
    """One microbatch through a layer or a stage; `input_grad` contains what is computed again."""

    forward: Parts = Parts()
    input_grad: Parts = Parts()
    weight_grad: Parts = Parts()

    def __add__(self, other: object) -> Passes:
        assert isinstance(other, Passes)
        return Passes(*map(operator.add, self, other))

    def times(self, factor: float) -> Passes:
        return Passes(*(part.times(factor) for part in self))

    @property
    def sum(self) -> Parts:
        return self.forward + self.input_grad + self.weight_grad


@functools.lru_cache(maxsize=64)
def largest_of_normal(count: int) -> float:
    """The largest of so many normally distributed numbers that is expected, in standard deviations (Blom 1958)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Speed:
    """The speeds of a cluster's device in one case, with its software, for a rank of a layer group."""

    cluster: Cluster
    case: Case
    peak: float
    element: int
    compiled: bool = False
    layer_ranks: int = 1
    _of_sent: dict[Sent, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def software(self) -> Software:
        return self.cluster.software

    @property
    def overlaps(self) -> bool:
        """Whether transfers run beside computing: not on a CPU, whose cores do both."""
        return not self.cluster.on_cpu

    @property
    def block_seconds(self) -> float:
        """Of the host's program for a pass through a block; on a CPU, host and device are one."""
        if self.compiled or self.cluster.on_cpu:
            return 0.0
        slowest = 1.0 + self.software.host_spread * largest_of_normal(self.layer_ranks)
        return slowest * self.software.block_seconds.of(self.case)

    @property
    def bandwidth(self) -> float:
        return self.cluster.device.memory_bandwidth * self.cluster.device.memory_efficiency.of(self.case)

    @property
    def launch(self) -> float:
        return self.cluster.device.launch_seconds.of(self.case)

    def product(self, m: float, k: float, n: float) -> float:
        """Seconds of [m, k] x [k, n]."""
        flops = 2.0 * m * k * n / (self.peak * self.cluster.device.product_efficiency.of(self.case))
        return flops + self.element * (m * k + k * n + m * n) / self.bandwidth + self.launch

    def attention(self, flops: float) -> float:
        """Seconds of a fused attention's FLOPs."""
        return flops / (self.peak * self.cluster.device.attention_efficiency.of(self.case)) + self.launch

    def memory(self, size: float) -> float:
        """Seconds of bytes read and written."""
        return size / self.bandwidth

    def transfers(self, sent: Iterable[Sent]) -> float:
        """Seconds of transfers, one after the other."""
        return sum(map(self._seconds, sent))

    def _seconds(self, sent: Sent) -> float:
        if (known := self._of_sent.get(sent)) is None:
            known = self._of_sent[sent] = sent.seconds(self.cluster.device, case=self.case)
        return known

    def of_keys(self, sent: Iterable[Sent]) -> float:
        """Those of keys and values."""
        return self.transfers(one for one in sent if one.role == "sequence")

    def of_experts(self, sent: Iterable[Sent]) -> float:
        """Those of rows to their experts and back, and of how many there are."""
        return self.transfers(one for one in sent if one.role == "experts")


@once_per("split")
def speed_of(config: ResolvedConfig, cluster: Cluster, case: Case) -> Speed:
    """Speeds in the configuration's number format."""
    given = config.logging.peak_tflops
    peak = cluster.peak(config.precision.precision) if given is None else given * 1e12
    assert peak is not None, "the planner refuses a format without a peak"
    element, compiled = ELEMENT_BYTES[config.precision.precision], config.training.compile
    return Speed(
        cluster=cluster,
        case=case,
        peak=peak,
        element=element,
        compiled=compiled,
        layer_ranks=ranks_of_role("layer", config.parallel),
    )


# ---- layers ----------------------------------------------------------------------------------------------------------


def _block_products(block: ResolvedModel, t: int) -> list[tuple[float, float]]:
    """Factors [k, n] of a block's products on one rank, without those of experts that tokens choose."""
    h, inner = block.hidden_size, block.inner_size
    if block.experts is not None:
        inner = block.experts.moe_shared_expert_size or 0
    f = inner / t
    of_mlp = [*[(h, f)] * (2 if block.gated else 1), (f, h)] if inner else []
    *into, (_, values) = attention_matrices(block).values()
    of_attention = [(k, n / t) for n, k in into] + [(k, n) for n, k in short_matrices(block)]
    return [*of_attention, (values / t, h), *of_mlp]


class _Experts(NamedTuple):
    """One pass through a block's experts on a rank, in seconds, and what it has besides.

    Attributes:
        gemm: of its products.
        memory: of what chooses experts, and orders rows and adds them up.
        weights: numbers of the rank's experts and of the router.
        operators: that the host issues.
    """

    gemm: float = 0.0
    memory: float = 0.0
    weights: float = 0.0
    operators: int = 0


# Of the rows of experts: written from tokens, read and written where they are exchanged, ordered by expert and back,
# read in the weighted sum. Of the router's scores, in fp32: written, softmax, sorted, summed.
_ROW_PASSES, _EXCHANGED_PASSES, _SCORE_PASSES_OF_ROUTER, _OPERATORS_OF_ROUTING = 5.0, 4.0, 10.0, 30


def _expert_pass(config: ResolvedConfig, block: ResolvedModel, speed: Speed) -> _Experts:
    """Every expert is one product after the other with its share of the rows; the router computes in fp32."""
    if (share := expert_share(config, block)) is None:
        return _Experts()
    h, number, rows = share.hidden, share.experts.num_experts, share.rows / share.held
    peak = speed.cluster.peak("fp32") or speed.peak
    router = replace(speed, peak=min(peak, speed.peak), element=4).product(share.scored, h, number)
    of_one = (share.matrices - 1) * speed.product(rows, h, share.inner) + speed.product(rows, share.inner, h)
    passes = _ROW_PASSES + (_EXCHANGED_PASSES if config.parallel.ep > 1 else 0.0)
    moved = speed.element * share.rows * (passes * h + share.matrices * share.inner)
    return _Experts(
        gemm=router + share.held * of_one,
        memory=speed.memory(moved + 4.0 * _SCORE_PASSES_OF_ROUTER * share.scored * number),
        weights=share.matrices * share.matrix + number * h,
        operators=share.matrices * share.held + _OPERATORS_OF_ROUTING,
    )


def _attention(config: ResolvedConfig, block: ResolvedModel, speed: Speed) -> tuple[Parts, Parts]:
    """Forward and backward of what lies between the projections."""
    t, s = ranks_of_role("layer", config.parallel), config.data.seq_length
    tokens = config.training.micro_batch_size * config.rank_positions
    if block.is_linear:
        # Roughly: products of chunks, one after the other for the states, and what is kept written and read.
        peak = min(speed.cluster.peak("fp32") or speed.peak, speed.peak)
        peak *= speed.cluster.device.product_efficiency.of(speed.case)
        least = tokens * chunk_flops(block) / t / peak + 2 * speed.launch * config.rank_positions / 64
        least += speed.memory(2 * tokens * linear_bytes(block, speed.element, kept=True) / t)
        return Parts(attention=least), Parts(attention=2 * least)
    heads, d = block.num_attention_heads / t, block.head_size
    keys = min(s, block.window_size or s)
    flops = 4.0 * tokens * keys * heads * d
    if config.training.attention == "fused-softmax" or speed.cluster.on_cpu:
        dropped = _DROPOUT_PASSES if block.attention_dropout else 0.0
        scores = speed.element * tokens * s * heads
        count = config.training.micro_batch_size * heads
        whole = 2 * 2.0 * tokens * s * heads * d / speed.peak / speed.cluster.device.product_efficiency.of(speed.case)
        moved = speed.memory(2 * speed.element * count * 2 * s * d)
        forward = whole + moved + speed.memory((_SCORES_FORWARD + dropped) * scores)
        backward = 2.0 * (whole + moved) + speed.memory((_SCORES_BACKWARD + dropped) * scores)
        return Parts(attention=forward), Parts(attention=backward)
    seen = flops * (1 - keys / (2.0 * s)) if config.is_causal else flops  # fused kernels skip what no position sees
    return Parts(attention=speed.attention(seen)), Parts(attention=speed.attention(2.5 * seen))


def _with_host(parts: Parts, operators: int, speed: Speed) -> Parts:
    """No faster than the host issues operators, which it does while the device computes and waits for transfers."""
    least = operators * speed.cluster.device.host_seconds.of(speed.case)
    least = max(least, speed.block_seconds)
    return parts._replace(memory=parts.memory + max(least - parts.total, 0.0))


@once_per("layers")
def block_passes(config: ResolvedConfig, layer: ModelLayer, speed: Speed, *, again: bool) -> Passes:
    """One microbatch through one block."""
    block = layer.block
    assert block is not None
    t, e = ranks_of_role("layer", config.parallel), speed.element
    tokens = config.training.micro_batch_size * config.rank_positions
    split = t if config.parallel.sequence_parallel else 1
    products, experts = _block_products(block, t), _expert_pass(config, block, speed)
    if layer.with_head:
        products = [(2.0 * block.hidden_size, block.hidden_size / split), *products]
    gemm = sum(speed.product(tokens, k, n) for k, n in products) + experts.gemm
    heads = (block.linear_widths[1] if block.is_linear else block.num_attention_heads * block.head_size) / t
    width = block.inner_size if block.experts is None else block.experts.moe_shared_expert_size or 0
    inner = (3 if block.gated else 2) * width / t
    passes = tokens * e * (RESIDUAL_PASSES * block.hidden_size / split + inner + HEAD_PASSES * heads)
    elementwise = speed.memory(passes) + experts.memory
    attention, attention_backward = _attention(config, block, speed)
    traffic = layer_traffic(config, layer, again=again)
    software = speed.software
    overlap = software.tensor_overlap.of(speed.case) if speed.overlaps else 0.0
    # In a ring keys and values travel beside attention, which otherwise waits for them.
    beside = 1.0 if config.context_comm == "ring" and speed.overlaps else 0.0
    keys, rows = speed.of_keys(traffic.forward), speed.of_experts(traffic.forward)
    transfer = speed.transfers(traffic.forward) - rows
    hidden = min(transfer - keys, overlap * gemm) if software.overlaps_forward else 0.0
    hidden += min(keys, beside * attention.total)
    forward = Parts(gemm=gemm, memory=elementwise, exposed=transfer - hidden, dispatch=rows, hidden=hidden) + attention
    forward = _with_host(forward, _OPERATORS_FORWARD + experts.operators, speed)
    weights = sum(k * n for k, n in products) + experts.weights
    summed = ELEMENT_BYTES[config.precision.grad_reduce_dtype]
    added = 0.0 if software.fused_accumulation else weights * (2.0 * summed + e)
    weight_grad = Parts(gemm=gemm, memory=speed.memory(added))
    # Every sum of an input's gradient runs beside the product for a weight's (parallel/tensor.py).
    keys, rows = speed.of_keys(traffic.backward), speed.of_experts(traffic.backward)
    transfer = speed.transfers(traffic.backward) - rows
    window = 0.0 if config.parallel.may_split_backward else weight_grad.gemm * overlap
    hidden = min(transfer - keys, window) + min(keys, beside * attention_backward.total)
    backward = Parts(gemm=gemm, memory=2 * elementwise, exposed=transfer - hidden, dispatch=rows, hidden=hidden)
    operators = _OPERATORS_BACKWARD + 2 * experts.operators
    backward = _with_host(backward + attention_backward + weight_grad, operators, speed) + weight_grad.times(-1.0)
    recompute = config.training.recompute
    if again:
        backward += forward
    elif recompute == "selective":
        backward += attention + Parts(exposed=speed.of_keys(traffic.again))
    elif recompute == "light":
        backward += Parts(memory=elementwise / 2)
    return Passes(forward, backward, weight_grad)


@once_per("layers")
def _edge_passes(config: ResolvedConfig, layer: ModelLayer, speed: Speed) -> Passes:
    """One microbatch through the embedding or the head."""
    t, h = ranks_of_role("layer", config.parallel), config.model.hidden_size
    tokens, e = config.training.micro_batch_size * config.rank_positions, speed.element
    traffic = layer_traffic(config, layer, again=False)
    exposed = Parts(exposed=speed.transfers(traffic.forward)), Parts(exposed=speed.transfers(traffic.backward))
    if layer.name == "embedding":
        moved = Parts(memory=speed.memory(3.0 * tokens * e * h))
        return Passes(moved + exposed[0], exposed[1], moved)
    rows = vocabulary_rows(config.model, t)
    product = Parts(gemm=speed.product(tokens, h, rows))
    of_logit = LOGIT_PASSES / 2 * e, LOGIT_PASSES / 2 * e
    if speed.software.copies_logits:
        of_logit = e + 4.0 * _COPY_FORWARD, e + 4.0 * _COPY_BACKWARD
    depths = 1.0 + config.model.mtp_num_layers
    product = product.times(depths)
    forward, backward = (product + Parts(memory=speed.memory(depths * size * tokens * rows)) for size in of_logit)
    if head_has_loss(config) and not speed.software.copies_logits:
        return Passes(forward + backward + product + exposed[0], exposed[1])
    return Passes(forward + exposed[0], backward + exposed[1], product)


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """One microbatch through one stage.

    Attributes:
        passes: with the transfers of its layers, and on ZeRO stages 2 and 3 those of its parameters.
        replicas_hidden: seconds of transfers between replicas beside one microbatch.
        replicas_exposed: seconds that a microbatch waits for them; contained in `passes`.
    """

    passes: Passes
    replicas_hidden: float = 0.0
    replicas_exposed: float = 0.0

    @functools.cached_property
    def sum(self) -> Parts:
        """All passes together."""
        return self.passes.sum

    @functools.cached_property
    def computing(self) -> tuple[float, float]:
        """Seconds of forward and of backward without transfers."""
        forward, input_grad, weight_grad = self.passes
        return forward.compute, input_grad.compute + weight_grad.compute

    @functools.cached_property
    def totals(self) -> tuple[float, float, float]:
        """Seconds of each pass."""
        return self.passes.forward.total, self.passes.input_grad.total, self.passes.weight_grad.total

    @functools.cached_property
    def total(self) -> float:
        """Seconds of all passes."""
        return self.sum.total


def stage_time(config: ResolvedConfig, layers: Sequence[ModelLayer], speed: Speed) -> StageTime:
    """What the layers of one stage take for one microbatch.

    Args:
        config: a resolved configuration.
        layers: of the stage.
        speed: of the device.
    """
    alone = _stage_alone(config, layers, speed)
    if config.parallel.zero_stage < 2 or ranks_of_role("replicas", config.parallel) == 1:
        return alone
    return _with_replicas(config, layers, alone.passes, speed)


@once_per("layers")
def _stage_alone(config: ResolvedConfig, layers: Sequence[ModelLayer], speed: Speed) -> StageTime:
    """A stage whose replicas send nothing in a microbatch."""
    counts: Counter[tuple[int, bool, bool]] = Counter()
    blocks: dict[tuple[int, bool, bool], ModelLayer] = {}
    total = Passes()
    for layer, again in zip(layers, recomputed_whole(config, layers), strict=True):
        if layer.block is None:
            total += _edge_passes(config, layer, speed)
            continue
        counts[key := (id(layer.block), again, layer.with_head)] += 1
        blocks[key] = layer
    for key, count in counts.items():
        total += block_passes(config, blocks[key], speed, again=key[1]).times(count)
    return StageTime(passes=total)


@once_per("state")
def rank_replicas(config: ResolvedConfig, *, parameters: int, experts: int) -> tuple[ReplicaTraffic, ReplicaTraffic]:
    """What replicas send of a rank's parameters, without those of experts and of those alone.

    Args:
        config: a resolved configuration.
        parameters: that the rank holds.
        experts: how many of them are of experts.
    """
    return replica_traffic(config, parameters - experts), replica_traffic(config, experts, of_experts=True)


def _with_replicas(config: ResolvedConfig, layers: Sequence[ModelLayer], total: Passes, speed: Speed) -> StageTime:
    """With what ZeRO's stages 2 and 3 send in every microbatch."""
    (held,) = held_by_layer([layers])
    both = rank_replicas(config, parameters=sum(held), experts=held_experts(config, layers))
    gather = 0.0
    if config.parallel.zero_stage == 3:
        gather = speed.transfers(replace(one.parameters, count=1) for one in both if one.parameters is not None)
    reduce = speed.transfers(replace(one.gradients, count=1) for one in both if one.gradients is not None)
    forward, backward = total.forward.total, total.input_grad.total + total.weight_grad.total
    if not config.parallel.overlap_grad_reduce:
        backward = gather
    if not speed.overlaps:
        forward = backward = 0.0
    hidden_forward, hidden_backward = min(gather, forward), min(gather + reduce, backward)
    exposed_forward, exposed_backward = gather - hidden_forward, gather + reduce - hidden_backward
    counts = weights_apart(config, 0) if gather else [0]
    apart = gather * sum(counts) / len(counts) / config.microbatches  # of all weights, before their gradients
    waiting = Passes(Parts(exposed=exposed_forward), Parts(exposed=exposed_backward), Parts(exposed=apart))
    return StageTime(
        passes=total + waiting,
        replicas_hidden=hidden_forward + hidden_backward,
        replicas_exposed=exposed_forward + exposed_backward + apart,
    )


def stage_times(config: ResolvedConfig, stages: Sequence[Sequence[ModelLayer]], speed: Speed) -> tuple[StageTime, ...]:
    """Each stage's time; stages that are one and the same, as those of a `Cut` may be, take the same.

    Args:
        config: a resolved configuration.
        stages: the layers of each.
        speed: of the device.
    """
    known = {id(layers): layers for layers in stages}
    times = {key: stage_time(config, layers, speed) for key, layers in known.items()}
    return tuple(times[id(layers)] for layers in stages)
