"""What a rank sends in a training step: every transfer of activations, gradients and parameters, by role of its group.

Counted from the configuration and the layers, in the order of megacore's code: parallel/tensor.py for tensor
parallelism, parallel/context.py for context parallelism, layers/moe.py and parallel/experts.py for experts,
pipeline/transport.py for the pipeline, zero/ for the replicas. A test compares the sums with what gloo ranks send. Not
counted are sums of a few numbers (norms, token counts, statistics of the loss) and the padding of ZeRO's buckets: less
than 32 elements per parameter and 32 per rank and bucket, with moments in 8 bits 256, or than a block where gradients
are compressed. The traffic of 1-bit optimizers is that after their warm-up, when replicas sum the momentum. With ZeRO
and sequence parallelism the sum of `replicated gradients` is the mean over the replicas: it depends on which parameters
lie in a rank's shard.

A ring sends `(n - 1) / n` of a tensor that it gathers or scatters over n ranks, and twice as much of one that it
reduces to all; these are the bytes that each rank sends, and that it receives (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.compression import format_of
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.config.logits import loss_chunks
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.reproducible import canonical_blocks
from megacore.models.outline import ModelLayer
from megacore.models.size import norm_parameters, vocabulary_rows, whole_attention_parameters
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.schedule import Op
from megacore.pipeline.schedule_file import placement, training_schedule
from megacore.plan.devices import Device
from megacore.plan.in_flight import enough_microbatches
from megacore.plan.roofline import Collective, Pattern, groups_between_nodes, transfer_seconds
from megacore.plan.state import (
    ExpertShare,
    expert_copies,
    expert_share,
    held_by_layer,
    held_experts,
    term_bytes,
    zero_stage,
)
from megacore.plan.whole_matrices import directions

Role = Literal["layer", "sequence", "experts", "pipeline", "replicas"]
LinkClass = Literal["node", "network"]
ROLE_NAMES: dict[str, str] = {
    "layer": "tensor parallel",
    "sequence": "context parallel",
    "experts": "expert parallel",
    "pipeline": "pipeline",
    "replicas": "data parallel",
}
TIED = "tied gradients"
"""What the first and the last stage send of the table that they share."""


@dataclass(frozen=True, kw_only=True)
class Sent(Collective):
    """Transfers of one kind that a rank takes part in during a step.

    Attributes:
        role: of the group.
        what: they carry.
        count: of them; a mean where some parameters are sent more often than others.
        among: the ranks that form such groups (`crossing`).
    """

    role: Role
    what: str
    count: float
    among: range

    @property
    def kind(self) -> str:
        """What a report calls it: by its role, but tied gradients, which are sent once a step, by their name."""
        return TIED if self.what == TIED else ROLE_NAMES[self.role]

    @property
    def sent_bytes(self) -> float:
        """Bytes that the rank sends in the step."""
        if self.pattern == "message":
            return self.bytes * self.count
        share = (self.ranks - 1) / self.ranks
        return self.bytes * self.count * share * (2 if self.pattern == "all-reduce" else 1)

    def seconds(self, device: Device, *, case: Literal["slow", "expected", "fast"] = "expected") -> float:
        """All of them, one after the other and beside nothing."""
        return self.count * transfer_seconds(self, device, case=case)

    def link(self, node_ranks: int, *, position: int = 0) -> LinkClass:
        """What a rank sends it over. A collective: between nodes if any of the groups is, since a step waits for the
        slowest, and a ring is as fast as its slowest part. A message between two pipeline stages: between the two
        ranks.

        Args:
            node_ranks: ranks of a node.
            position: the rank's number in its pipeline stage.
        """
        if self.is_between_stages:
            low = self.among.start + position
            return "node" if low // node_ranks == (low + self.stride) // node_ranks else "network"
        return "network" if groups_between_nodes(self.ranks, self.stride, self.among, node_ranks) else "node"

    @property
    def is_between_stages(self) -> bool:
        """Whether each rank of a pipeline stage sends it to the rank of the same position in another one."""
        return self.role == "pipeline" and self.ranks == 2


class Sums(NamedTuple):
    """Where a layer meets its group: tensors [b, s, h] that enter split products, and that leave them. Those that
    experts split are counted in `_expert_traffic`.

    Without sequence parallelism what leaves is summed in forward, and the gradient of what enters in backward. With it
    what enters is gathered and what leaves is scattered; backward does the reverse, and gathers what enters again.
    """

    entering: int
    leaving: int


def layer_sums(layer: ModelLayer) -> Sums:
    """Of one microbatch and one forward with its backward."""
    if layer.block is not None:
        block = layer.block
        count = 1 if block.experts is not None and not block.experts.moe_shared_expert_size else 2
        # Side by side, too: attention and MLP have a product each that x enters. A later token is embedded first.
        return Sums(count, count + layer.with_head)
    return Sums(0, 1) if layer.name == "embedding" else Sums(1, 0)


class LayerTraffic(NamedTuple):
    """What one layer sends over its group in one microbatch, by pass; `again` is recomputation's."""

    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    again: tuple[Sent, ...]


GroupName = Literal["layer", "split", "sequence", "experts", "replicas", "shards", "across", "copies"]


class _Group(NamedTuple):
    """Groups that all ranks form, by what they are for."""

    role: Role
    ranks: int
    stride: int


def _group(config: ResolvedConfig, name: GroupName) -> _Group:
    """`split`: the ranks that split an expert; `copies`: those that hold the same one."""
    parallel = config.parallel
    if name == "split":
        return _Group("layer", parallel.expert_split, 1)
    if name == "experts":
        return _Group("experts", parallel.ep, parallel.expert_split)
    if name == "copies":
        return _Group("replicas", expert_copies(parallel), parallel.ep * parallel.expert_split)
    t = ranks_of_role("layer", parallel)
    if name == "layer":
        return _Group("layer", t, 1)
    if name == "sequence":
        return _Group("sequence", ranks_of_role("sequence", parallel), t)
    replicas, shards = ranks_of_role("replicas", parallel), shard_ranks(parallel)
    if name == "across":
        return _Group("replicas", replicas // shards, t * shards)
    return _Group("replicas", replicas if name == "replicas" else shards, t)


def _sent(
    config: ResolvedConfig, group: GroupName, pattern: Pattern, what: str, size: float, *counts: float
) -> list[list[Sent]]:
    """Transfers of one kind, of which there are so many; none in a group of one rank, and none if nothing is in them.
    A list for each count."""
    role, ranks, stride = _group(config, group)
    among, sends = range(config.parallel.ranks), size > 0 and ranks > 1
    return [
        [Sent(role=role, pattern=pattern, what=what, bytes=size, count=n, ranks=ranks, stride=stride, among=among)]
        if n and sends
        else []
        for n in counts
    ]


class _Passes:
    """Collects what a layer sends. `again`: whether backward computes its forward again, with its transfers."""

    def __init__(self, config: ResolvedConfig, *, again: bool) -> None:
        self.config, self.again = config, again
        self.forward, self.backward, self.repeated = list[Sent](), list[Sent](), list[Sent]()

    def add(
        self, group: GroupName, pattern: Pattern, what: str, size: float,
        *, forward: int = 0, backward: int = 0, again: int = 0, selective: int = 0,
    ) -> None:  # fmt: skip
        """Add so many transfers by pass. `selective`: those that recomputation of attention alone repeats."""
        repeated = again if self.again else selective * (self.config.training.recompute == "selective")
        sent = _sent(self.config, group, pattern, what, size, forward, backward, repeated)
        for transfers, more in zip((self.forward, self.backward, self.repeated), sent, strict=True):
            transfers += more


def layer_traffic(config: ResolvedConfig, layer: ModelLayer, *, again: bool) -> LayerTraffic:
    """Transfers of a layer over the layer group, and over the ranks that divide sequences, for one microbatch.

    Args:
        config: a resolved configuration.
        layer: one of the model's.
        again: whether backward computes the layer's forward again, with its transfers.
    """
    passes = _Passes(config, again=again)
    if ranks_of_role("layer", config.parallel) > 1:
        _add_tensor_traffic(passes, layer)
    if ranks_of_role("sequence", config.parallel) > 1:
        _add_context_traffic(passes, layer)
    if layer.block is not None and (share := expert_share(config, layer.block)) is not None:
        _add_expert_traffic(passes, share)
    return LayerTraffic(tuple(passes.forward), tuple(passes.backward), tuple(passes.repeated))


def _add_expert_traffic(passes: _Passes, share: ExpertShare) -> None:
    """Rows to their experts and back, with the number of rows for each; their gradients the other way. What the ranks
    that split an expert gather and sum. And the choices of a sequence, where a loss balances them: how often each
    expert was chosen, and how many choices are padding.

    Recomputation keeps the route, and stops before the last sum, which no gradient needs: with a shared expert that is
    its own. With canonical blocks all positions are on every rank, and the sums of what the experts give, and of the
    gradients of what enters each of their matrices, in fp32."""
    config, e, add = passes.config, ELEMENT_BYTES[passes.config.precision.precision], passes.add
    whole, weights = e * share.tokens * share.hidden, 4.0 * share.rows  # of a token's experts, in fp32
    split, is_canonical = bool(config.parallel.sequence_parallel), canonical_blocks(config) > 1
    sequence, has_shared = ranks_of_role("sequence", config.parallel), bool(share.experts.moe_shared_expert_size)

    def gathered(what: str, size: float, **counts: int) -> None:
        if is_canonical and split:
            add("layer", "all-gather", what, size / sequence, **counts)
        if is_canonical or split:
            add("sequence" if is_canonical else "split", "all-gather", what, size, **counts)

    if is_canonical:
        gathered("indices of experts", 2 * weights, forward=1)
    add("experts", "all-to-all", "numbers of rows", 8.0 * share.experts.num_experts, forward=1)
    if not is_canonical:
        gathered("indices of experts", 2 * weights, forward=1)
    if share.experts.moe_aux_loss_coeff:
        size = 4.0 * config.training.micro_batch_size * (share.experts.num_experts + 1)
        add("sequence", "all-reduce", "choices", size, forward=1, again=1)
        add("layer", "all-reduce", "choices", size, forward=split, again=split)
    gathered("tokens", whole, forward=1, backward=1, again=1)
    gathered("weights of experts", weights, forward=1, again=1)
    summing: Pattern = "reduce-scatter" if split else "all-reduce"
    if not is_canonical:
        add("split", summing, "tokens", whole, backward=1)
        add("split", summing, "weights of experts", weights, backward=1)
    add("experts", "all-to-all", "rows of experts", e * share.rows * share.hidden, forward=2, backward=2, again=2)
    if not is_canonical:
        add("split", summing, "tokens", whole, forward=1, again=has_shared)
        return
    size, counts = 4.0 * share.rows * share.hidden, {"forward": 1, "backward": share.matrices - 1, "again": 1}
    add("sequence", "all-reduce", "rows of experts", size, **counts)
    add("layer", "all-reduce", "rows of experts", size, **counts)


def _add_context_traffic(passes: _Passes, layer: ModelLayer) -> None:
    """Keys and values in forward and once more in backward, and their gradients, in fp32: gathered and summed, or a
    rank's share at a time from rank to rank. Gradients of a share start where the next rank has computed its terms.
    Or positions for heads, and back. Recomputation of attention stops before its results, which backward does not need,
    are exchanged."""
    config, block, add = passes.config, layer.block, passes.add
    ranks, t = ranks_of_role("sequence", config.parallel), ranks_of_role("layer", config.parallel)
    e, b = ELEMENT_BYTES[config.precision.precision], config.training.micro_batch_size
    if canonical_blocks(config) > 1:
        _add_gathered_context(passes, layer)
    elif block is not None and block.is_linear:
        # Whatever --cp-comm says: the end of each chunk's input for the convolution, and in fp32 what it makes of any
        # state; two chunks of each rank.
        features, values = block.linear_widths
        k, v = block.linear_key_head_dim, block.linear_value_head_dim
        tails, passes_on = e * (block.linear_conv_kernel_dim - 1) * (2 * features + values), 1 if block.is_mamba else k
        states = 4 * k * (passes_on + v)
        for what, size in {"ends of chunks": tails, "states": block.linear_num_value_heads * states}.items():
            add("sequence", "all-gather", what, 2.0 * ranks * b * size / t, forward=1, again=1, selective=1)
            add("sequence", "reduce-scatter", what, 2.0 * ranks * b * size / t, backward=1)
    elif block is not None and config.context_comm == "ulysses":
        held = max(block.query_groups / t, 1)
        copied = max(held, ranks)  # key heads; at least one for each rank
        tokens = b * config.rank_positions
        keys: float = tokens * block.head_size * 2 * copied
        queries = tokens * block.head_size * (block.num_attention_heads / t)
        is_copied = held < copied  # the gradients of copies are summed in fp32
        counts = {"forward": 1, "backward": int(not is_copied), "again": 1, "selective": 1}
        add("sequence", "all-to-all", "queries, keys and values", e * (queries + keys), **counts)
        add("sequence", "all-to-all", "attention's results", e * queries, forward=1, backward=1, again=1)
        add("sequence", "all-to-all", "gradients of queries", e * queries, backward=is_copied)
        add("sequence", "all-to-all", "gradients of keys and values", 4 * keys, backward=is_copied)
    elif block is not None:
        # Numbers in the keys and values of a microbatch's sequences.
        keys = 2.0 * b * config.data.seq_length * (block.head_size * max(block.query_groups / t, 1))
        is_ring = config.context_comm == "ring"
        parts, count = (ranks, ranks - 1) if is_ring else (1, 1)
        counts = dict.fromkeys(("forward", "backward", "again", "selective"), count)
        add("sequence", "message" if is_ring else "all-gather", "keys and values", keys * e / parts, **counts)
        summing: Pattern = "message" if is_ring else "reduce-scatter"
        add("sequence", summing, "their gradients", keys * 4 / parts, backward=count)


def _add_gathered_context(passes: _Passes, layer: ModelLayer) -> None:
    """With canonical blocks: all positions of what enters products, also in backward, and fp32 sums of what leaves
    them, of which each rank gets its positions."""
    config, (entering, leaving) = passes.config, layer_sums(layer)
    e, tokens = (
        ELEMENT_BYTES[config.precision.precision],
        float(config.training.micro_batch_size * config.data.seq_length),
    )
    size = tokens * config.model.hidden_size
    if layer.name == "embedding":
        passes.add("sequence", "all-gather", "gradients of rows", e * size, backward=1)
        passes.add("sequence", "all-gather", "tokens", 8.0 * tokens, backward=1)
        return
    gathered = leaving + (0 if layer.name == "head" else entering)  # the head keeps what it has gathered
    counts = {"forward": leaving, "backward": entering, "again": _sums_again(layer, leaving)}
    passes.add("sequence", "all-gather", "activations", e * size, forward=entering, backward=gathered, again=entering)
    passes.add("sequence", "all-to-all", "activations", 4 * size, **counts)


def _add_tensor_traffic(passes: _Passes, layer: ModelLayer) -> None:
    config, add, split = passes.config, passes.add, bool(passes.config.parallel.sequence_parallel)
    e, tokens = ELEMENT_BYTES[config.precision.precision], config.training.micro_batch_size * config.rank_positions
    numbers = float(tokens * config.model.hidden_size)
    # Sums of canonical blocks are fp32: an all-to-all, and without sequence parallelism an all-gather.
    summed = 4 if canonical_blocks(config) > 1 and layer.name != "embedding" else e
    entering, leaving = layer_sums(layer)
    counts = {"forward": leaving, "again": _sums_again(layer, leaving)}
    if layer.name == "head":
        entering += config.model.mtp_num_layers
    if split:
        # The head's loss in chunks keeps its gathered input, and so does a backward in two halves.
        keeps = config.training.reproducible or config.parallel.may_split_backward
        keeps = keeps or (layer.name == "head" and loss_chunks(config) > 1)
        gathered = leaving + (0 if keeps else entering)
        add("layer", "all-gather", "activations", numbers * e, forward=entering, backward=gathered, again=entering)
    summing: Pattern = "reduce-scatter" if split else "all-reduce"
    add("layer", summing, "activations", numbers * summed, backward=entering, **counts)
    if layer.block is not None and layer.block.is_linear:
        # Its rates, which every rank projects from its positions, and their gradients.
        size = e * float(tokens) * layer.block.linear_rates
        add("layer", "all-gather", "rates", size, forward=split, again=split)
        add("layer", summing, "rates", size, backward=1)


def _sums_again(layer: ModelLayer, leaving: int) -> int:
    """How many of a block's sums recomputation repeats: it stops before the last one, which no gradient needs. That may
    be one of experts."""
    ends_in_experts = layer.block is not None and layer.block.experts is not None
    return leaving if ends_in_experts and leaving == 1 else max(leaving - 1, 0)


def recomputed_whole(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> list[bool]:
    """For each layer of a stage whether backward computes all of it again."""
    first, blocks, again = config.training.recompute_num_layers, 0, []
    for layer in layers:
        blocks += layer.block is not None
        inside = layer.block is not None and (first is None or blocks <= first)
        again.append(config.training.recompute == "full" and inside)
    return again


def stage_message(config: ResolvedConfig) -> Sent:
    """An activation, or its gradient, on its way to the next stage."""
    e = ELEMENT_BYTES[config.precision.precision]
    split = ranks_of_role("layer", config.parallel) if config.parallel.sequence_parallel else 1
    size = e * config.training.micro_batch_size * config.rank_positions * config.model.hidden_size / split
    return _pipeline_message(config, "activations", size)


def _pipeline_message(config: ResolvedConfig, what: str, size: float) -> Sent:
    """Between any two neighbours of a pipeline, which takes as long as between the two that the slowest links join."""
    pp, ranks = config.parallel.pp, config.parallel.ranks
    return Sent(
        role="pipeline",
        pattern="message",
        what=what,
        bytes=size,
        count=1,
        ranks=pp,
        stride=ranks // pp,
        among=range(ranks),
    )


def _between(message: Sent, source: int, target: int, *, count: int) -> Sent:
    """Messages between neighbouring pipeline ranks. The last and the first are neighbours, where ranks have several
    stages."""
    stage, rank = message.stride, source if (source + 1) % message.ranks == target else target
    if rank == message.ranks - 1:
        return replace(message, ranks=2, stride=rank * stage, count=count)
    return replace(message, ranks=2, among=range(rank * stage, (rank + 2) * stage), count=count)


class ReplicaTraffic(NamedTuple):
    """What a rank and its replicas send in a step.

    Attributes:
        gradients: per reduction; on stages 2 and 3 there is one in each microbatch.
        parameters: per gathering; on stage 3 there are two in each microbatch, and a third one where the gradients of
            its weights are computed apart from those of inputs.
        across: the sum of a shard's gradients over its copies, once (--zero-shard-size).
    """

    gradients: Sent | None
    parameters: Sent | None
    across: Sent | None = None

    @property
    def in_order(self) -> list[Sent]:
        """Those that there are."""
        return [sent for sent in self if sent is not None]


def replica_traffic(
    config: ResolvedConfig,
    parameters: int,
    *,
    used_twice: int = 0,
    spanning: int = 0,
    of_experts: bool = False,
    apart: float = 0.0,
) -> ReplicaTraffic:
    """Reductions of gradients and gatherings of parameters in a step.

    Args:
        config: a resolved configuration.
        parameters: that the rank holds.
        used_twice: how many of them two of its layers use; stage 3 gathers them for each.
        spanning: how many of them two of its pipeline stages use; stages 2 and 3 reduce them for each.
        of_experts: whether they are those of experts, of which fewer ranks hold copies.
        apart: microbatches for which stage 3 gathers them once more, to compute gradients of weights.
    """
    group: GroupName = "copies" if of_experts else "shards"
    stage, e, m = zero_stage(config), ELEMENT_BYTES[config.precision.precision], config.microbatches
    summed: float = term_bytes(config)
    if (compressed := format_of(config)) is not None:  # as many bytes to the ranks that add up, and from them to all
        summed = compressed.bytes_per_element
    reduced = parameters + (spanning if stage >= 2 else 0)
    whole = parameters + (used_twice if stage == 3 else 0)
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * m + apart}[stage]
    pattern: Pattern = "all-reduce" if stage == 0 else "reduce-scatter"
    (gradients,) = _sent(config, group, pattern, "gradients", float(reduced * summed), m if stage >= 2 else 1)
    (parts,) = _sent(config, group, "all-gather", "parameters", float(whole * e), gathers)
    across = list[Sent]()
    if parts and not of_experts:
        size = float(parameters * summed) / _group(config, group).ranks
        (across,) = _sent(config, "across", "all-reduce", "gradients across shards", size, 1)
    return ReplicaTraffic(*(next(iter(sent), None) for sent in (gradients, parts, across)))


def weights_apart(config: ResolvedConfig, rank: int) -> list[int]:
    """Of each stage of a pipeline rank, the microbatches of a step whose gradients of weights are computed apart from
    those of inputs: all of them, none, or those of a schedule that splits only some backwards."""
    parallel, m = config.parallel, config.microbatches
    stages = placement(parallel).stages_of(rank)
    if not parallel.may_split_backward:
        return [0] * len(stages)
    few = enough_microbatches(parallel, m)
    actions = training_schedule(parallel, few).computations(rank)
    apart = Counter(action.stage for action in actions if action.op is Op.WEIGHT_GRAD)
    return [m if apart[stage] == few else apart[stage] for stage in stages]


def rank_traffic(config: ResolvedConfig, layers: Sequence[ModelLayer], rank: int) -> list[Sent]:
    """Everything that one rank of a pipeline sends in a step.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        rank: its number in the pipeline.
    """
    parallel, m = config.parallel, config.microbatches
    stages, placed = stage_ranges(layers, config), placement(parallel)
    transfers: list[Sent] = []
    numbers = placed.stages_of(rank)
    chunks = [[layers[i] for i in stages[number]] for number in numbers]
    for number, held in zip(numbers, chunks, strict=True):
        for layer, again in zip(held, recomputed_whole(config, held), strict=True):
            passes = layer_traffic(config, layer, again=again)
            transfers += [replace(sent, count=sent.count * m) for group in passes for sent in group]
        if number > 0 and (before := placed.rank_of(number - 1)) != rank:
            transfers.append(_between(stage_message(config), before, rank, count=m))
        if number < len(stages) - 1 and (after := placed.rank_of(number + 1)) != rank:
            transfers.append(_between(stage_message(config), rank, after, count=m))
            # With the activations: the document number of each position, or its position in the document.
            if beside := len(config.beside_hidden_states):
                size = 8.0 * config.training.micro_batch_size * config.data.seq_length
                message = _pipeline_message(config, "documents", size)
                transfers.append(_between(message, rank, after, count=m * beside))
    on_rank = list(itertools.chain(*chunks))
    held_here, routed = sum(map(sum, held_by_layer(chunks))), held_experts(config, on_rank)
    used_twice = spanning = 0
    if on_rank[0] is layers[0] and (shared := max(layer.shared for layer in on_rank)):
        # On one stage the table is in the embedding's bucket, otherwise in one of its own.
        spanning = 0 if any(layer.tied for layer in chunks[0]) else shared
        used_twice = spanning or layers[0].held or 0
    of_stages = weights_apart(config, rank)
    apart = (
        sum(map(operator.mul, of_stages, map(sum, held_by_layer(chunks)))) + of_stages[-1] * used_twice
    )  # the last stage has the head
    apart /= max(held_here + used_twice, 1)
    replicas = replica_traffic(config, held_here - routed, used_twice=used_twice, spanning=spanning, apart=apart)
    of_experts = replica_traffic(config, routed, of_experts=True, apart=apart)
    transfers += [sent for traffic in (replicas, of_experts) for sent in traffic.in_order]
    transfers += _further_sums(config, on_rank)
    transfers += update_traffic(config, chunks)
    return list(_joined(transfers))


def update_traffic(config: ResolvedConfig, chunks: Sequence[Sequence[ModelLayer]]) -> list[Sent]:
    """What an optimizer that takes matrices whole sends of the directions of their update: on ZeRO's stage 0 replicas
    gather what each has computed a part of; tensor-parallel ranks send slices to the one that joins them, and back.

    Args:
        config: a resolved configuration.
        chunks: the layers of each of the rank's stages.
    """
    settings = config.optimizer_settings
    if not settings.joins_slices:
        return []
    found = [directions(config, chunk) for chunk in chunks]
    element = float(settings.direction_bytes(config.precision.precision))
    gathered, of_experts, joined = (element * sum(numbers) for numbers in zip(*found, strict=True))
    kinds = [
        *_sent(config, "shards", "all-gather", "directions", gathered, 1),
        *_sent(config, "copies", "all-gather", "directions", of_experts, 1),
        *_sent(config, "layer", "all-to-all", "directions", joined, 2),
    ]
    return list(itertools.chain(*kinds))


def tied_gradients(config: ResolvedConfig) -> Sent | None:
    """The sum of the gradients of the tied table, on the first and the last pipeline rank; None where none is sent."""
    model, parallel = config.model, config.parallel
    placed, shares = placement(parallel), not model.untie_embeddings_and_output_weights or model.mtp_num_layers
    if not shares or placed.rank_of(placed.stages - 1) == 0:
        return None
    t, d = ranks_of_role("layer", parallel), shard_ranks(parallel)
    size = float(term_bytes(config)) * vocabulary_rows(model, t) * model.hidden_size / (d if parallel.zero_stage else 1)
    return _between(_pipeline_message(config, TIED, size), parallel.pp - 1, 0, count=1)


def _further_sums(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> list[Sent]:
    """Those of a rank with these layers."""
    transfers = list[list[Sent]]()
    tied, names = tied_gradients(config), {layer.name for layer in layers}
    if tied is not None and len(names & {"embedding", "head"}) == 1:
        transfers.append([tied])
    split = bool(config.parallel.sequence_parallel)
    blocks = [block for layer in layers if (block := layer.block) is not None and block.experts is not None]
    if config.model.experts is not None:  # how often each expert was chosen
        size = 8.0 * len(blocks) * (config.model.experts.num_experts + 2)  # and padding, and dropped rows
        transfers += _sent(config, "replicas", "all-reduce", "choices", size, 1)
        transfers += _sent(config, "layer", "all-reduce", "choices", size, split)
    count = sum(_replicated(config.model, layer) for layer in layers)
    size = float(term_bytes(config)) * count / (shard_ranks(config.parallel) if config.parallel.zero_stage else 1)
    transfers += _sent(config, "layer", "all-reduce", "replicated gradients", size, split)
    return list(itertools.chain(*transfers))


def _replicated(model: ResolvedModel, layer: ModelLayer) -> int:
    """Parameters that every rank of the layer group holds whole."""
    norm = norm_parameters(model)
    if layer.block is not None:
        attention_bias = layer.block.attention_output_bias and not layer.block.is_linear
        biases = (layer.block.mlp_bias + attention_bias) * model.hidden_size
        if layer.block.experts is not None:  # the router, and the gate of a shared expert
            experts = layer.block.experts
            biases += model.hidden_size * (experts.num_experts + experts.moe_shared_expert_gate)
        if layer.with_head:
            biases += 3 * norm + 2 * model.hidden_size**2
        return model.block_norms * norm + biases + whole_attention_parameters(layer.block)
    if layer.name == "head":  # or the first block of multi-token prediction
        return norm
    positions = model.position_rows * model.hidden_size
    learned = positions if model.position_embedding_type == "learned" else 0
    return learned + (norm if model.embedding_layernorm else 0)


def _joined(transfers: Iterable[Sent]) -> Iterator[Sent]:
    """Transfers that differ only in their number as one."""
    counts: dict[Sent, float] = defaultdict(float)
    for sent in transfers:
        counts[replace(sent, count=1)] += sent.count
    return (replace(sent, count=count) for sent, count in counts.items())


def bytes_by_link(transfers: Sequence[Sent], node_ranks: int) -> dict[tuple[str, LinkClass], float]:
    """Bytes that a rank of a pipeline stage sends in a step, by `Sent.kind` and class of links: each of that rank which
    sends most of it, since messages of some ranks may stay in a node.

    Args:
        transfers: of each of the stage's ranks, as `rank_traffic` returns them.
        node_ranks: ranks of a node.
    """
    # Of the ranks of a stage which is no smaller than a node, all messages go to another node: one is as good as all.
    stage = max((len(sent.among) - sent.stride for sent in transfers if sent.is_between_stages), default=1)
    most: dict[tuple[str, LinkClass], float] = {}
    for position in range(min(stage, node_ranks)):
        total: dict[tuple[str, LinkClass], float] = {}
        for sent in transfers:
            key = sent.kind, sent.link(node_ranks, position=position)
            total[key] = total.get(key, 0.0) + sent.sent_bytes
        most |= {key: max(size, most.get(key, 0.0)) for key, size in total.items()}
    return most
