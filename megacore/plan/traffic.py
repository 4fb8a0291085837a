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
from collections import Counter
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
from megacore.pipeline.schedule_file import placement
from megacore.plan.devices import Device
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
ROLE_NAMES: dict[Role, str] = {
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
        count: of them.
        among: the ranks that form such groups (`crossing`).
    """

    role: Role
    what: str
    count: int
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


def layer_traffic(config: ResolvedConfig, layer: ModelLayer, *, again: bool) -> LayerTraffic:
    """Transfers of a layer over the layer group, and over the ranks that divide sequences, for one microbatch.

    Args:
        config: a resolved configuration.
        layer: one of the model's.
        again: whether backward computes the layer's forward again, with its transfers.
    """
    kinds = [_tensor_traffic(config, layer, again=again), _context_traffic(config, layer, again=again)]
    if layer.block is not None and layer.block.experts is not None:
        kinds.append(_expert_traffic(config, layer.block, again=again))
    return LayerTraffic(*(sum(passes, ()) for passes in zip(*kinds, strict=True)))


def _expert_traffic(config: ResolvedConfig, block: ResolvedModel, *, again: bool) -> LayerTraffic:
    """Rows to their experts and back, with the number of rows for each; their gradients the other way. What the ranks
    that split an expert gather and sum. And the choices of a sequence, where a loss balances them."""
    share, e, parallel = expert_share(config, block), ELEMENT_BYTES[config.precision.precision], config.parallel
    assert share is not None
    whole, weights = e * share.tokens * share.hidden, 4.0 * share.rows  # of a token's experts, in fp32

    if canonical_blocks(config) > 1:
        return _gathered_expert_traffic(config, share, again=again)

    def of_split(pattern: Pattern, what: str, size: float) -> tuple[Sent, ...]:
        return _sent(config, "layer", pattern, what, size, ranks=parallel.expert_split)

    routing, taken = _among_experts(config, "numbers of rows", 8.0 * share.experts.num_experts), tuple[Sent, ...]()
    rows = _among_experts(config, "rows of experts", e * share.rows * share.hidden, 2)
    if share.experts.moe_aux_loss_coeff:
        taken += _choices(config, share)
    if parallel.sequence_parallel:
        taken += of_split("all-gather", "tokens", whole) + of_split("all-gather", "weights of experts", weights)
        routing += of_split("all-gather", "indices of experts", 2 * weights)
        leaving, back = of_split("reduce-scatter", "tokens", whole), of_split("all-gather", "tokens", whole)
        back += of_split("reduce-scatter", "tokens", whole) + of_split("reduce-scatter", "weights of experts", weights)
    else:
        leaving = of_split("all-reduce", "tokens", whole)
        back = leaving + of_split("all-reduce", "weights of experts", weights)
    # Recomputation stops before the last sum, which no gradient needs: with a shared expert that is its own.
    repeated = taken + rows + (leaving if share.experts.moe_shared_expert_size else ())
    # Recomputation keeps the route.
    return LayerTraffic(routing + taken + rows + leaving, back + rows, repeated if again else ())


def _among_experts(config: ResolvedConfig, what: str, size: float, count: int = 1) -> tuple[Sent, ...]:
    ranks, stride = config.parallel.ep, config.parallel.expert_split
    return _sent(config, "experts", "all-to-all", what, size, ranks=ranks, stride=stride, count=count)


def _choices(config: ResolvedConfig, share: ExpertShare) -> tuple[Sent, ...]:
    """How often each expert was chosen in each sequence, and how many choices are padding: for a loss that balances."""
    layer, sequence = ranks_of_role("layer", config.parallel), ranks_of_role("sequence", config.parallel)
    size = 4.0 * config.training.micro_batch_size * (share.experts.num_experts + 1)
    taken = _sent(config, "sequence", "all-reduce", "choices", size, ranks=sequence, stride=layer)
    here = layer if config.parallel.sequence_parallel else 1
    return taken + _sent(config, "layer", "all-reduce", "choices", size, ranks=here)


def _gathered_expert_traffic(config: ResolvedConfig, share: ExpertShare, *, again: bool) -> LayerTraffic:
    """With canonical blocks: all positions on every rank, and sums of what the experts give, and of the gradients of
    what enters each of their matrices, in fp32 on every rank."""
    parallel, e = config.parallel, ELEMENT_BYTES[config.precision.precision]
    layer, sequence = ranks_of_role("layer", parallel), ranks_of_role("sequence", parallel)

    def gathered(what: str, size: float) -> tuple[Sent, ...]:
        here = layer if parallel.sequence_parallel else 1
        of_layer = _sent(config, "layer", "all-gather", what, size / sequence, ranks=here)
        return of_layer + _sent(config, "sequence", "all-gather", what, size, ranks=sequence, stride=layer)

    def summed(count: int) -> tuple[Sent, ...]:
        what, size = "rows of experts", 4.0 * share.rows * share.hidden
        of_sequence = _sent(config, "sequence", "all-reduce", what, size, ranks=sequence, stride=layer, count=count)
        return of_sequence + _sent(config, "layer", "all-reduce", what, size, ranks=layer, count=count)

    routing = gathered("indices of experts", 8.0 * share.rows)
    routing += _among_experts(config, "numbers of rows", 8.0 * share.experts.num_experts)
    taken = _choices(config, share) if share.experts.moe_aux_loss_coeff else ()
    whole = e * share.tokens * share.hidden
    taken += gathered("tokens", whole) + gathered("weights of experts", 4.0 * share.rows)
    rows = _among_experts(config, "rows of experts", e * share.rows * share.hidden, 2)
    back = gathered("tokens", whole) + rows + summed(share.matrices - 1)
    return LayerTraffic(routing + taken + rows + summed(1), back, taken + rows + summed(1) if again else ())


def _sent(
    config: ResolvedConfig,
    role: Role,
    pattern: Pattern,
    what: str,
    size: float,
    *,
    ranks: int,
    stride: int = 1,
    count: int = 1,
) -> tuple[Sent, ...]:
    """Transfers of one kind in groups that all ranks form; none in a group of one rank, and none if there are none."""
    if ranks == 1 or not count:
        return ()
    among = range(config.parallel.ranks)
    return (
        Sent(role=role, pattern=pattern, what=what, bytes=size, count=count, ranks=ranks, stride=stride, among=among),
    )


def _context_traffic(config: ResolvedConfig, layer: ModelLayer, *, again: bool) -> LayerTraffic:
    """Keys and values in forward and once more in backward, and their gradients, in fp32: gathered and summed, or a
    rank's share at a time from rank to rank. Gradients of a share start where the next rank has computed its terms.
    Or positions for heads, and back."""
    ranks, e = ranks_of_role("sequence", config.parallel), ELEMENT_BYTES[config.precision.precision]
    if ranks > 1 and canonical_blocks(config) > 1:
        return _gathered_context_traffic(config, layer, again=again)
    if ranks == 1 or layer.block is None:
        return LayerTraffic((), (), ())
    if layer.block.is_linear:
        return _chunk_traffic(config, layer.block, again=again or config.training.recompute == "selective")
    stride = ranks_of_role("layer", config.parallel)
    # Numbers in the keys and values of a microbatch's sequences.
    width = layer.block.head_size * max(layer.block.query_groups / stride, 1)
    keys = 2.0 * config.training.micro_batch_size * config.data.seq_length * width

    def sent(pattern: Pattern, what: str, size: float, count: int) -> tuple[Sent, ...]:
        return _sent(config, "sequence", pattern, what, size, ranks=ranks, stride=stride, count=count)

    if config.context_comm == "ulysses":
        t, block = ranks_of_role("layer", config.parallel), layer.block
        tokens, queries = config.training.micro_batch_size * config.rank_positions, block.num_attention_heads / t
        held = max(block.query_groups / t, 1)
        copied = max(held, ranks)  # key heads; at least one for each rank
        sizes = tokens * block.head_size * queries, tokens * block.head_size * 2 * copied
        taken = sent("all-to-all", "queries, keys and values", e * sum(sizes), 1)
        results = sent("all-to-all", "attention's results", e * sizes[0], 1)
        passing, returning = taken + results, taken + results
        if held < copied:  # the gradients of copies are summed in fp32
            returning = results + sent("all-to-all", "gradients of queries", e * sizes[0], 1)
            returning += sent("all-to-all", "gradients of keys and values", 4 * sizes[1], 1)
    elif config.context_comm == "ring":
        taken = passing = sent("message", "keys and values", keys * e / ranks, ranks - 1)
        returning = passing + sent("message", "their gradients", keys * 4 / ranks, ranks - 1)
    else:
        taken = passing = sent("all-gather", "keys and values", keys * e, 1)
        returning = passing + sent("reduce-scatter", "their gradients", keys * 4, 1)
    # Recomputation of attention stops before its results, which backward does not need, are exchanged.
    repeated = passing if again else taken if config.training.recompute == "selective" else ()
    return LayerTraffic(passing, returning, repeated)


def _chunk_traffic(config: ResolvedConfig, block: ResolvedModel, *, again: bool) -> LayerTraffic:
    """Of linear attention, whatever --cp-comm says: the end of each chunk's input for the convolution, and in fp32 what
    it makes of any state; two chunks of each rank."""
    ranks, t = ranks_of_role("sequence", config.parallel), ranks_of_role("layer", config.parallel)
    keys, values = block.linear_widths
    chunks, k, v = (
        2.0 * ranks * config.training.micro_batch_size,
        block.linear_key_head_dim,
        block.linear_value_head_dim,
    )
    tails = ELEMENT_BYTES[config.precision.precision] * (block.linear_conv_kernel_dim - 1) * (2 * keys + values)
    sizes = {"ends of chunks": tails, "states": 4 * block.linear_num_value_heads * k * (k + v)}

    def sent(pattern: Pattern) -> tuple[Sent, ...]:
        given = (
            _sent(config, "sequence", pattern, what, chunks * size / t, ranks=ranks, stride=t, count=min(size, 1))
            for what, size in sizes.items()
        )
        return sum(given, ())

    return LayerTraffic(sent("all-gather"), sent("reduce-scatter"), sent("all-gather") if again else ())


def _gathered_context_traffic(config: ResolvedConfig, layer: ModelLayer, *, again: bool) -> LayerTraffic:
    """With canonical blocks: all positions of what enters products, also in backward, and fp32 sums of what leaves
    them, of which each rank gets its positions."""
    ranks, stride = ranks_of_role("sequence", config.parallel), ranks_of_role("layer", config.parallel)
    e, h = ELEMENT_BYTES[config.precision.precision], config.model.hidden_size
    tokens = float(config.training.micro_batch_size * config.data.seq_length)

    def sent(pattern: Pattern, size: float, count: int = 1, what: str = "activations") -> tuple[Sent, ...]:
        return _sent(config, "sequence", pattern, what, size, ranks=ranks, stride=stride, count=count)

    if layer.name == "embedding":
        of_rows = sent("all-gather", e * tokens * h, what="gradients of rows")
        return LayerTraffic((), of_rows + sent("all-gather", 8.0 * tokens, what="tokens"), ())
    entering, leaving = layer_sums(layer)
    # The head keeps what it has gathered.
    gathered = leaving + (0 if layer.name == "head" else entering)
    forward = sent("all-gather", e * tokens * h, entering) + sent("all-to-all", 4 * tokens * h, leaving)
    backward = sent("all-gather", e * tokens * h, gathered) + sent("all-to-all", 4 * tokens * h, entering)
    repeated = sent("all-gather", e * tokens * h, entering)
    repeated += sent("all-to-all", 4 * tokens * h, _sums_again(layer, leaving))
    return LayerTraffic(forward, backward, repeated if again else ())


def _tensor_traffic(config: ResolvedConfig, layer: ModelLayer, *, again: bool) -> LayerTraffic:
    t = ranks_of_role("layer", config.parallel)
    if t == 1:
        return LayerTraffic((), (), ())
    e = ELEMENT_BYTES[config.precision.precision]
    numbers = float(config.training.micro_batch_size * config.rank_positions * config.model.hidden_size)
    # Sums of canonical blocks are fp32: an all-to-all, and without sequence parallelism an all-gather.
    summed = 4 if canonical_blocks(config) > 1 and layer.name != "embedding" else e
    entering, leaving = layer_sums(layer)
    if layer.name == "head":
        entering += config.model.mtp_num_layers

    def sent(pattern: Pattern, count: int) -> tuple[Sent, ...]:
        size = numbers * (e if pattern == "all-gather" else summed)
        return _sent(config, "layer", pattern, "activations", size, ranks=t, count=count)

    if config.parallel.sequence_parallel:
        forward = sent("all-gather", entering) + sent("reduce-scatter", leaving)
        # The head's loss in chunks keeps its gathered input, and so does a backward in two halves.
        keeps = config.training.reproducible or config.parallel.may_split_backward
        keeps = keeps or (layer.name == "head" and loss_chunks(config) > 1)
        gathered = leaving + (0 if keeps else entering)
        backward = sent("all-gather", gathered) + sent("reduce-scatter", entering)
    else:
        forward, backward = sent("all-reduce", leaving), sent("all-reduce", entering)
    gathered_rates, summed_rates = _rates_traffic(config, layer.block)
    forward, backward = forward + gathered_rates, backward + summed_rates
    if not again:
        return LayerTraffic(forward, backward, ())
    repeated = _sums_again(layer, leaving)
    if config.parallel.sequence_parallel:
        anew = sent("all-gather", entering) + sent("reduce-scatter", repeated)
        return LayerTraffic(forward, backward, anew + gathered_rates)
    return LayerTraffic(forward, backward, sent("all-reduce", repeated))


def _rates_traffic(config: ResolvedConfig, block: ResolvedModel | None) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """The rates of linear attention, which every rank projects from its positions, and their gradients."""
    if block is None or not block.is_linear:
        return (), ()
    tokens = float(config.training.micro_batch_size * config.rank_positions)
    size = ELEMENT_BYTES[config.precision.precision] * tokens * 2 * block.linear_num_value_heads

    def sent(pattern: Pattern) -> tuple[Sent, ...]:
        return _sent(config, "layer", pattern, "rates", size, ranks=ranks_of_role("layer", config.parallel))

    if config.parallel.sequence_parallel:
        return sent("all-gather"), sent("reduce-scatter")
    return (), sent("all-reduce")


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


@dataclass(frozen=True, kw_only=True)
class ReplicaTraffic:
    """What a rank and its replicas send in a step.

    Attributes:
        gradients: per reduction; on stages 2 and 3 there is one in each microbatch.
        parameters: per gathering; on stage 3 there are two in each microbatch, and a third one where the gradients of
            weights are computed apart from those of inputs.
        across: the sum of a shard's gradients over its copies, once (--zero-shard-size).
    """

    gradients: Sent | None
    parameters: Sent | None
    across: Sent | None = None

    @property
    def in_order(self) -> list[Sent]:
        """Those that there are."""
        return [sent for sent in (self.gradients, self.parameters, self.across) if sent is not None]


def replica_traffic(
    config: ResolvedConfig, parameters: int, *, used_twice: int = 0, spanning: int = 0, of_experts: bool = False
) -> ReplicaTraffic:
    """Reductions of gradients and gatherings of parameters in a step.

    Args:
        config: a resolved configuration.
        parameters: that the rank holds.
        used_twice: how many of them two of its layers use; stage 3 gathers them for each.
        spanning: how many of them two of its pipeline stages use; stages 2 and 3 reduce them for each.
        of_experts: whether they are those of experts, of which fewer ranks hold copies.
    """
    parallel, stage = config.parallel, zero_stage(config)
    d = expert_copies(parallel) if of_experts else shard_ranks(parallel)
    if d == 1 or not parameters:
        return ReplicaTraffic(gradients=None, parameters=None)
    e, m = ELEMENT_BYTES[config.precision.precision], config.microbatches
    summed: float = term_bytes(config)
    if (compressed := format_of(config)) is not None:  # as many bytes to the ranks that add up, and from them to all
        summed = compressed.bytes_per_element
    stride = parallel.ep * parallel.expert_split if of_experts else ranks_of_role("layer", parallel)

    def sent(pattern: Pattern, what: str, size: float, count: int) -> Sent:
        (one,) = _sent(config, "replicas", pattern, what, size, ranks=d, stride=stride, count=count)
        return one

    reduction: Pattern = "all-reduce" if stage == 0 else "reduce-scatter"
    reduced = parameters + (spanning if stage >= 2 else 0)
    gradients = sent(reduction, "gradients", float(reduced * summed), m if stage >= 2 else 1)
    gathered = {0: 0, 1: 1, 2: 1, 3: (3 if config.parallel.may_split_backward else 2) * m}[stage]
    if not gathered:
        return ReplicaTraffic(gradients=gradients, parameters=None)
    whole = parameters + (used_twice if stage == 3 else 0)
    copies, across = ranks_of_role("replicas", parallel) // d, None
    if copies > 1 and not of_experts:
        across = sent("all-reduce", "gradients across shards", float(parameters * summed) / d, 1)
        across = replace(across, ranks=copies, stride=stride * d)
    parts = sent("all-gather", "parameters", float(whole * e), gathered)
    return ReplicaTraffic(gradients=gradients, parameters=parts, across=across)


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
    replicas = replica_traffic(config, held_here - routed, used_twice=used_twice, spanning=spanning)
    of_experts = replica_traffic(config, routed, of_experts=True)
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
    settings, parallel = config.optimizer_settings, config.parallel
    if not settings.joins_slices:
        return []
    found = [directions(config, chunk) for chunk in chunks]
    element = float(settings.direction_bytes(config.precision.precision))
    t, of_expert = ranks_of_role("layer", parallel), parallel.ep * parallel.expert_split

    def of_copies(size: float, ranks: int, stride: int) -> tuple[Sent, ...]:
        return _sent(config, "replicas", "all-gather", "directions", size, ranks=ranks, stride=stride) if size else ()

    gathered, of_experts, joined = (element * sum(numbers) for numbers in zip(*found, strict=True))
    sent = of_copies(gathered, shard_ranks(parallel), t) + of_copies(of_experts, expert_copies(parallel), of_expert)
    if joined:
        sent += _sent(config, "layer", "all-to-all", "directions", joined, ranks=t, count=2)
    return list(sent)


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
    transfers = []
    tied, names = tied_gradients(config), {layer.name for layer in layers}
    if tied is not None and len(names & {"embedding", "head"}) == 1:
        transfers.append(tied)
    t, d = ranks_of_role("layer", config.parallel), ranks_of_role("replicas", config.parallel)
    blocks = [block for layer in layers if (block := layer.block) is not None and block.experts is not None]
    if blocks and config.model.experts is not None:  # how often each expert was chosen
        size = 8.0 * len(blocks) * (config.model.experts.num_experts + 2)  # and padding, and dropped rows
        transfers += _sent(config, "replicas", "all-reduce", "choices", size, ranks=d, stride=t)
        here = t if config.parallel.sequence_parallel else 1
        transfers += _sent(config, "layer", "all-reduce", "choices", size, ranks=here)
    if t > 1 and config.parallel.sequence_parallel:
        count = sum(_replicated(config.model, layer) for layer in layers)
        size = float(term_bytes(config)) * count / (shard_ranks(config.parallel) if config.parallel.zero_stage else 1)
        transfers += _sent(config, "layer", "all-reduce", "replicated gradients", size, ranks=t)
    return transfers


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
    counts: Counter[Sent] = Counter()
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
