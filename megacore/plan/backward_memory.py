"""What the layers of a stage keep for backward, and what exists for a moment while backward runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.bert import ResolvedBertConfig
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.models.size import ELEMENT_BYTES, largest_product, loss_chunks, vocabulary_rows
from megacore.pipeline.in_flight import StageBackward
from megacore.plan.activations import (
    activation_gradient_bytes,
    attention_again_bytes,
    attention_gradient_bytes,
    attention_gradients_are_exact,
    attention_is_later,
    block_bytes,
    embedding_kept_bytes,
    forward_passing_bytes,
    freed_by_experts,
    freed_in_weight_half,
    halves_gradient_bytes,
    head_freed_bytes,
    inner_bytes,
    input_half_bytes,
    kept_gradient_bytes,
    mlp_gradient_bytes,
    product_input_bytes,
    residual_bytes,
    shared_inner_bytes,
)
from megacore.plan.cut import OnRank
from megacore.plan.experts import expert_copies, expert_share, routed_parameters
from megacore.plan.once import once_per_layers
from megacore.plan.state import PlannedLayer, forgets_gradients, term_bytes, updates_in_one_pass
from megacore.plan.traffic import recomputed_whole
from megacore.plan.unreduced import Held, Piece, last_before_projections, pieces, pieces_of_mlp, unreduced
from megacore.plan.whole_matrices import WholeBucket, whole_buckets, with_padding
from megacore.zero.buckets import grown


def kept_by_layer(layers: Sequence[PlannedLayer], config: ResolvedConfig, *, on_cpu: bool) -> list[float]:
    """Activations of one microbatch in the layers of a stage, without the head's."""
    sizes: dict[tuple[int, bool], float] = {}
    kept = []
    for layer, again in zip(layers, recomputed_whole(config, layers), strict=True):
        if layer.block is None:
            kept.append(embedding_kept_bytes(config) if layer.name == "embedding" else 0.0)
            continue
        if (key := (id(layer.block), again)) not in sizes:
            how = "none" if config.training.recompute == "full" and not again else config.training.recompute
            sizes[key] = block_bytes(config, layer.block, on_cpu=on_cpu, recompute=how)
        kept.append(sizes[key])
    return kept


def _distinct(blocks: Iterable[ResolvedModel]) -> Iterable[ResolvedModel]:
    """The blocks that are not one and the same."""
    return {id(block): block for block in blocks}.values()


def _largest_block(config: ResolvedConfig, blocks: Iterable[ResolvedModel], *, on_cpu: bool) -> float:
    """What a block keeps of a microbatch where nothing is computed again; 0 where there is none."""
    kept = (block_bytes(config, block, on_cpu=on_cpu, recompute="none") for block in _distinct(blocks))
    return max(kept, default=0.0)


def computed_again(config: ResolvedConfig, blocks: Sequence[ResolvedModel], *, on_cpu: bool) -> float:
    """What the block that is computed again keeps besides what was kept of it: its input, or this rank's shard of it,
    which is gathered."""
    if config.training.recompute == "light" and not config.training.compile:  # one output of a norm or an activation
        activated = [_activated_bytes(config, block) for block in _distinct(blocks)]
        return max(residual_bytes(config), *activated) if activated else 0.0
    if config.training.recompute == "selective":
        cores = (attention_again_bytes(config, block, on_cpu=on_cpu) for block in _distinct(blocks))
        return max(cores, default=0.0)
    if config.training.recompute == "full":
        kept = 0.0 if config.training.distribute_saved_activations else residual_bytes(config)
        return max(_largest_block(config, blocks, on_cpu=on_cpu) - kept, 0.0)
    return 0.0


def computed_again_by_layer(config: ResolvedConfig, layers: Sequence[PlannedLayer], again: float) -> list[float]:
    """Of each layer of a stage what it keeps besides its input when it is computed again: `again`, or 0."""
    if config.training.recompute == "full":
        return [again if whole else 0.0 for whole in recomputed_whole(config, layers)]
    return [again if layer.block is not None else 0.0 for layer in layers]


def _activated_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """The largest output of an activation that `light` computes again; ReLU keeps its output itself."""
    return 0.0 if block.activation == "relu" else max(inner_bytes(config, block), shared_inner_bytes(config, block))


def kept_gradients(config: ResolvedConfig, layers: Sequence[PlannedLayer]) -> list[float]:
    """Where backward is split, gradients of a microbatch that wait for those of the weights, by layer. Of a block that
    is computed again also what its products read: it waits for them too."""
    sizes: dict[tuple[int, bool], float] = {}
    found = []
    for layer, again in zip(layers, recomputed_whole(config, layers), strict=True):
        if layer.block is None:
            found.append(residual_bytes(config))
            continue
        if (key := (id(layer.block), again)) not in sizes:
            read = product_input_bytes(config, layer.block) if again else 0.0
            sizes[key] = kept_gradient_bytes(config, layer.block) + read
        found.append(sizes[key])
    return found


def product_inputs_left(config: ResolvedConfig, layers: Sequence[PlannedLayer]) -> list[float]:
    """By layer, the inputs of products that come from host memory and that the half for inputs leaves on the device for
    the half for weights. 0 where one operator gives both gradients, because it takes them in each half."""
    return [
        product_input_bytes(config, layer.block)
        if layer.block is not None and _sums_take_products(config, layer, 0, on_cpu=False)
        else 0.0
        for layer in layers
    ]


class _OfLayer(NamedTuple):
    """Of a layer what `_beside` counts, `_largest_gradient`, and `inner_bytes`; and `_more_in_attention`."""

    beside: float
    largest: int
    inner: float
    later: float


@once_per_layers
def _of_layer(
    config: ResolvedConfig, layer: PlannedLayer, table: int, *, head: float, again: float, on_cpu: bool
) -> _OfLayer:
    return _OfLayer(
        beside=_beside(config, layer, table, head=head, again=again, on_cpu=on_cpu),
        largest=_largest_gradient(config, layer),
        inner=0.0 if layer.block is None else inner_bytes(config, layer.block),
        later=0.0 if layer.block is None else _more_in_attention(config, layer.block, on_cpu=on_cpu),
    )


def _more_in_attention(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """By how much the gradient of a block's output adds to `_beside` if it outlives the block's MLP, at most: all of it
    where most exists in attention, and as much as brings attention above the MLP where most exists there."""
    if block.parallel_residual or not attention_is_later(config, block, on_cpu=on_cpu):
        return 0.0
    in_attention = attention_gradient_bytes(config, block, on_cpu=on_cpu)
    in_mlp = max(mlp_gradient_bytes(config, block, on_cpu=on_cpu), halves_gradient_bytes(config, block, on_cpu=on_cpu))
    return max(residual_bytes(config) - max(in_mlp - in_attention, 0.0), 0.0)


class Passing(NamedTuple):
    """Attributes of a rank's memory by these names."""

    passing: float
    reducing: float


def passing_bytes(
    config: ResolvedConfig,
    on_rank: OnRank,
    backward: StageBackward,
    *,
    head: float,
    again: float,
    working: float,
    kept: Sequence[Sequence[float]],
    on_cpu: bool,
) -> Passing:
    """What exists for a moment of a backward, at the layer where it is most.

    Activations of the layers that backward has passed are freed. The gradient that another stage sent stays until
    backward ends; where backward is split it is one of those that wait. Besides what `_beside` counts, ZeRO adds:

    - stage 2: the buckets that are filled and the one that is reduced (unreduced.py). While a block's second gradient
      is added, the tensors of the inner width are freed;
    - stage 3: these of two layers, and the parameters of two, or with a split backward of all. A layer's bucket is made
      for its first gradient, when the input of the product that gave it is freed. With parameters in host memory also
      the shard of the next layer on its way, and of the sums besides the one that is reduced one on its way to the host
      and one that is fetched to be added to. In the head also the table that it shares with the embedding, whose
      bucket is made after both gradients;
    - both: the last bucket of the rank's backward before, which is being reduced until this one reduces its first.

    A first backward makes the gradients of the layers that it has passed, if they do not outlive a step: on stages 2
    and 3 shards, else those of ranks without replicas, or of experts without copies. Where they are not sharded and the
    optimizer updates a bucket in one pass, it copies those of the layer itself into their buffer; other optimizers
    take them as autograd gives them.

    Args:
        config: a resolved configuration.
        on_rank: the layers of the rank's stages.
        backward: which one.
        head: what exists in the head while its gradients are computed.
        again: what a block that is computed again keeps besides its input.
        working: as much of this as the rank's memory counts already.
        kept: what each layer keeps of a microbatch, as `kept_by_layer` has it.
        on_cpu: whether the ranks compute in host memory.
    """
    e, term = ELEMENT_BYTES[config.precision.precision], term_bytes(config)
    shards, splits = shard_ranks(config.parallel), config.parallel.may_split_backward
    on_host = config.parallel.offload_params
    stage = config.parallel.zero_stage if shards > 1 or on_host else 0
    takes_whole = config.optimizer_settings.takes_some_whole
    (at, previous, is_first, follows_first), table = backward, on_rank.table
    copies = expert_copies(config.parallel)
    has_copies = copies > 1
    holds_experts = stage < 2 or has_copies or on_host  # experts without copies are neither reduced nor gathered

    def sizes_of(at: int) -> Sequence[int]:
        chunk, sizes = on_rank.chunks[at], on_rank.by_layer[at]
        if not holds_experts:
            sizes = [size - routed_parameters(config, layer.block) for layer, size in zip(chunk, sizes, strict=True)]
        return with_padding(config, chunk, sizes, on_cpu=on_cpu) if stage == 3 and takes_whole else sizes

    def buckets_of(at: int) -> _Buckets:
        limit = min(int(config.parallel.bucket_size_mb * 2**20), sum(on_rank.by_layer[at]))
        of_layer = zip(on_rank.chunks[at], sizes_of(at), strict=True)
        parts = tuple(pieces(config, *pair, experts=has_copies, on_cpu=on_cpu) for pair in of_layer)
        whole = whole_buckets(config, on_rank.chunks[at], on_cpu=on_cpu) if takes_whole else ()
        return _Buckets(parts, (grown(limit, shards), grown(limit, copies)), (shards, copies), whole)

    def last_of(at: int) -> int:
        """The last bucket of a stage, which is being reduced until a later backward reduces its first one."""
        if stage == 2:
            return unreduced(*buckets_of(at)).last
        if stage == 3 and on_rank.chunks[at]:
            return _last_reduced(config, on_rank.chunks[at][0], sizes_of(at)[0], has_copies=has_copies, on_cpu=on_cpu)
        return 0

    found = [(0.0, 0.0)]
    lingering = last_of(previous) if previous >= 0 else 0
    chunk, sizes, kept_here = on_rank.chunks[at], sizes_of(at), kept[at]
    agains = computed_again_by_layer(config, chunk, again)
    is_sent = config.parallel.pp > 1 and bool(chunk) and chunk[-1].name != "head"
    received = residual_bytes(config) if is_sent and not splits else 0.0
    of_layers: Sequence[_Filled] = [_Filled()] * len(chunk)
    if stage == 2:
        of_layers = _filled_on_stage_2(buckets_of(at), lingering, (follows_first, is_first))
    waiting = kept_gradients(config, chunk) if splits else [0.0] * len(chunk)
    freed, made, made_sharded, new, sharded, later_size = 0.0, 0.0, 0.0, 0.0, 0.0, lingering
    # What has been made grows from layer to layer by the same.
    inside = _inside_runs(chunk, sizes, kept_here, [[held[:-1] for held in layer.held] for layer in of_layers])
    for number in reversed(range(len(chunk))):
        layer, size = chunk[number], sizes[number]
        if inside[number]:
            freed += kept_here[number] + waiting[number]
            made, made_sharded = made + term * new, made_sharded + term * sharded
            continue
        of_layer, reducing = _of_layer(config, layer, table, head=head, again=agains[number], on_cpu=on_cpu), 0.0
        moment, largest, inner = of_layer[:3]
        filled, gathered = of_layers[number], 0
        if stage == 3:
            gathered = sum(sizes) if splits else sum(sizes[max(number - 1, 0) : number + 1])
            if layer.name == "head" and not splits:
                gathered += table
            if on_host and shards > 1:
                moment += e * sizes[max(number - 1, 0)] / shards
            sums = follows_first if number == len(chunk) - 1 else is_first, is_first
            filled = _filled_on_stage_3(config, layer, size, (shards, copies), later_size, sums, on_cpu=on_cpu)
        forward = _forward_bytes(config, layer, filled, lingering, again=agains[number], made=made)
        is_apart = number < len(chunk) - 1  # of the last layer it is the gradient of the output, while that is needed
        moment += e * gathered + made + (received if is_apart else min(received, of_layer.later))
        if is_first:
            unsharded, sharded = _made_by_first(config, layer, size, holds_experts=holds_experts)
            new = unsharded + sharded
            copied = 0 if _sums_take_rows(config, layer, table) else largest
            if updates_in_one_pass(config, on_cpu=on_cpu):
                moment += max(term * min(copied, unsharded) - _freed_before_copy(config, layer, table, head=head), 0.0)
            made += term * new
        if filled.held:
            more, reducing = _at_pieces(config, layer, filled, inner=inner, head=head, table=table, on_cpu=on_cpu)
            moment += more - (made_sharded if stage == 2 else 0.0)
        if is_first:
            made_sharded += term * sharded
        found.append((moment - freed - working, reducing))
        if forward:
            arrived = received if is_apart else 0.0
            found.append((forward + e * gathered + arrived - freed - working, 0.0))
        freed += kept_here[number] + waiting[number]
        if stage == 3:
            later_size = _last_reduced(config, layer, size, has_copies=has_copies, on_cpu=on_cpu)
    if splits:
        # The half for inputs comes to the gradients of scores when those of earlier operators do not wait yet.
        gathered, later = sum(sizes) if stage == 3 else 0, 0.0
        for layer, again_here, waits in zip(chunk, agains, waiting, strict=True):
            half = 0.0 if layer.block is None else input_half_bytes(config, layer.block, on_cpu=on_cpu)
            if half:
                half += again_here + e * gathered + term * lingering + (head if chunk[-1].name == "head" else 0.0)
                found.append((half - later - working, 0.0))
            later += waits
    if splits and table:
        # The half for inputs computes the gradients of the shared table, and frees no activations.
        gathered = sum(sizes) if stage == 3 else 0
        found.append((head + residual_bytes(config) + e * (3 * table + gathered) + term * lingering - working, 0.0))
    if stage >= 2 and not on_host and chunk and chunk[0].name == "embedding":
        # The last bucket, while it is reduced; of the embedding it is large.
        last, present = (term * sizes[0], e * sizes[0]) if stage == 3 else (term * last_of(at), 0.0)
        found.append((made + last + present - freed - working, 0.0 if is_first else last / shards))
    passing, reducing = max(found, key=sum)
    return Passing(passing, reducing)


class _Buckets(NamedTuple):
    """Arguments of `unreduced`."""

    layers: tuple[tuple[Piece, ...], ...]
    limits: tuple[float, float]
    ranks: tuple[int, int]
    whole: tuple[WholeBucket, ...] = ()


class _Filled(NamedTuple):
    """The pieces of a layer, and what exists at each of them in the order of backward; on stages below 2 none."""

    pieces: tuple[Piece, ...] = ()
    held: Sequence[Held] = ()


def _filled_on_stage_2(buckets: _Buckets, before: int, sums: tuple[bool, bool]) -> list[_Filled]:
    """For each layer of a stage; `before` and `sums` as `unreduced` has them."""
    return [_Filled(*pair) for pair in zip(buckets.layers, unreduced(*buckets, before, sums).by_layer, strict=True)]


def _filled_on_stage_3(
    config: ResolvedConfig,
    layer: PlannedLayer,
    size: int,
    ranks: tuple[int, int],
    before: int,
    sums: tuple[bool, bool],
    *,
    on_cpu: bool,
) -> _Filled:
    """Of a layer of `size` parameters: one bucket, or two where it has experts with copies. The reduction of the head's
    begins while its logits exist, or its parameters; those of others end with the layer."""
    copies = ranks[1]
    has_own = layer.name == "head" if layer.block is None else layer.block.experts is not None and copies > 1
    if not has_own:
        return _Filled((), [Held(size + before, size, 0.0 if sums[0] else before / ranks[0])])
    # Those that the optimizer takes whole are in the bucket of their layer.
    parts = tuple(part._replace(whole=0) for part in pieces(config, layer, size, experts=True, on_cpu=on_cpu))
    return _filled_on_stage_2(_Buckets((parts,), (math.inf, math.inf), ranks), before, sums)[0]


def _at_pieces(
    config: ResolvedConfig,
    layer: PlannedLayer,
    filled: _Filled,
    *,
    inner: float,
    head: float,
    table: int,
    on_cpu: bool,
) -> tuple[float, float]:
    """What exists beside activations and their gradients, less what is freed by then, at the piece of a layer where it
    is most: buckets and first shards; and the shard that is added to an earlier one."""
    term = term_bytes(config)
    of_shard = term * (3 if config.parallel.offload_params and shard_ranks(config.parallel) > 1 else 1)
    freed_first = _freed_first(config, layer, table, inner=inner, head=head, on_cpu=on_cpu)
    early = _freed_by_piece(config, layer, filled.pieces, freed_first, on_cpu=on_cpu)
    found = []
    if layer.block is not None and layer.block.experts is not None and expert_copies(config.parallel) == 1:
        # The gradients of experts arrive before a bucket is made.
        first = filled.held[0]
        found.append((term * (first.total - first.made + first.sharded), of_shard * first.reduced))
    for held in filled.held:
        here = term * held.sharded - early(held)
        before_adding = 0.0 if held.piece or held.arrived else freed_first.before_adding
        most = max(here + term * (held.total - held.made), here - before_adding + term * held.total)
        found.append((most, of_shard * held.reduced))
    if layer.block is not None and (freed := _freed_in_attention(config, layer, table, on_cpu=on_cpu)) is not None:
        # In attention, before the first gradient of its projections, whose bucket is made after that.
        number = last_before_projections(filled.pieces, layer.block)
        for held in filled.held:
            if held.piece == number and not held.arrived:
                found.append((term * (held.sharded + held.total - held.made) - freed, of_shard * held.reduced))
    return max(found, key=sum)


def _freed_in_attention(config: ResolvedConfig, layer: PlannedLayer, table: int, *, on_cpu: bool) -> float | None:
    """What `_beside` counts of a block and does not exist in its attention; None where that is not known."""
    block = layer.block
    if block is None or config.parallel.may_split_backward:  # then attention is in the half for inputs
        return None
    if not attention_gradients_are_exact(config, block, on_cpu=on_cpu):
        return None
    in_attention = attention_gradient_bytes(config, block, on_cpu=on_cpu)
    return _in_block(config, layer, block, table, on_cpu=on_cpu) - in_attention


def _forward_bytes(
    config: ResolvedConfig, layer: PlannedLayer, filled: _Filled, lingering: int, *, again: float, made: float
) -> float:
    """What exists beside activations when the rows of a block's experts come back in forward; 0 where they do not
    travel. A block that is computed again does this in backward: beside what it keeps, the gradient of its output, what
    backward has made, and buckets that are not reduced."""
    passing = 0.0 if layer.block is None else forward_passing_bytes(config, layer.block)
    if not passing or config.training.recompute != "full" or not again:
        return passing and passing + term_bytes(config) * lingering
    unreduced_yet = filled.held[0].total - filled.held[0].made if filled.held else lingering
    return passing + again + residual_bytes(config) + made + term_bytes(config) * unreduced_yet


def _last_reduced(config: ResolvedConfig, layer: PlannedLayer, size: int, *, has_copies: bool, on_cpu: bool) -> int:
    """On stage 3, elements of the bucket of a layer of `size` parameters that is reduced last: reductions wait for each
    other, and of two buckets the one without experts is the last, or the one without a table that has its own."""
    if layer.block is not None:
        return size - (routed_parameters(config, layer.block) if has_copies else 0)
    parts = pieces(config, layer, size, experts=has_copies, on_cpu=on_cpu)
    apart = sum(part.size for part in parts if part.kind == "apart")
    return size - apart or apart


class _Made(NamedTuple):
    """Gradients that a first backward makes of a layer and that outlive it: their number, on this rank."""

    unsharded: float
    sharded: float


def _made_by_first(config: ResolvedConfig, layer: PlannedLayer, size: int, *, holds_experts: bool) -> _Made:
    """Of a layer of `size` parameters, with or without those of experts."""
    routed = routed_parameters(config, layer.block)
    counts = [
        (size - routed if holds_experts else size, False, ranks_of_role("replicas", config.parallel)),
        (routed, True, expert_copies(config.parallel)),
    ]
    unsharded = sharded = 0.0
    for count, of_experts, ranks in counts:
        if not forgets_gradients(config, of_experts=of_experts):
            continue
        if ranks == 1:
            unsharded += count
        else:
            sharded += count / (ranks if of_experts else shard_ranks(config.parallel))
    return _Made(unsharded, sharded)


def _inside_runs(chunk: Sequence[PlannedLayer], *figures: Sequence[object]) -> list[bool]:
    """For each layer whether the two before it and the two after it are like it in everything. From one such layer to
    the next what exists grows or shrinks by the same, so that none of them is where it is most."""
    kinds = [(id(layer.block), *values) for layer, *values in zip(chunk, *figures, strict=True)]
    last = len(kinds) - 2
    return [1 < n < last and kinds[n - 2 : n + 3].count(kinds[n]) == 5 for n in range(len(kinds))]


def _beside(
    config: ResolvedConfig, layer: PlannedLayer, table: int, *, head: float, again: float, on_cpu: bool
) -> float:
    """What exists beside activations while backward is at a layer: gradients of activations, the largest gradient that
    one operator gives, and of a `table` that the head shares with the embedding the head's gradient, which autograd
    keeps until it has both; it then has both and their sum."""
    e, gradient = ELEMENT_BYTES[config.precision.precision], gradient_bytes(config, layer, table, on_cpu=on_cpu)
    if layer.block is not None and config.parallel.may_split_backward:
        # The half for weights has no gradients of activations but those that wait for it, which are counted apart; the
        # half for inputs, at its end, the gradient of the stage's input.
        return again + max(gradient + e * table, residual_bytes(config))
    if layer.block is not None:
        return again + e * table + _in_block(config, layer, layer.block, table, on_cpu=on_cpu)
    if layer.name == "embedding":
        return residual_bytes(config) + max(gradient, 3.0 * e * table)
    whole = e * config.training.micro_batch_size * config.rank_positions * config.model.hidden_size
    # The gradient of the head's input; with sequence parallelism also the input, gathered once more.
    # And that of BERT's sentence task, which waits to be added to it.
    sentence = residual_bytes(config) if isinstance(config, ResolvedBertConfig) and config.bert.has_sentence_head else 0
    of_chunk = 0.0
    if (chunks := loss_chunks(config)) > 1 and gradient:
        # The gradient of a chunk of the weight, beside that of all; the input's is then in its sum in fp32.
        of_chunk = e * _largest_gradient(config, layer) / chunks
    gathered = whole if config.parallel.sequence_parallel else 0.0
    return head + gradient + sentence + max(float(whole), of_chunk) + gathered


def _in_block(config: ResolvedConfig, layer: PlannedLayer, block: ResolvedModel, table: int, *, on_cpu: bool) -> float:
    """Gradients of activations in a block's backward and the largest one of a weight, or those of an MLP's halves."""
    of_product = gradient_bytes(config, layer, table, on_cpu=on_cpu)
    of_product += activation_gradient_bytes(config, block, on_cpu=on_cpu)
    return max(of_product, halves_gradient_bytes(config, block, on_cpu=on_cpu))


class _FreedFirst(NamedTuple):
    """Of what `_beside` counts, and of what a block keeps, that which is freed early in a layer's backward.

    Attributes:
        before_adding: between the product that gives the first gradient and the making of its bucket; 0 where most
            exists later.
        with_first: when the first gradient has been added.
        arriving: when a reduction begins because of it: less where a product adds it.
    """

    before_adding: float
    with_first: float
    arriving: float


def _freed_first(
    config: ResolvedConfig, layer: PlannedLayer, table: int, *, inner: float, head: float, on_cpu: bool
) -> _FreedFirst:
    """Of a block the input of its last product, and then all tensors of the inner width; of the head the logits; of a
    table that the head shares with the embedding the two gradients whose sum is added."""
    gradient = gradient_bytes(config, layer, table, on_cpu=on_cpu)
    if layer.block is not None:
        if config.parallel.may_split_backward:
            return _FreedFirst(0.0, 0.0, gradient)
        halves = halves_gradient_bytes(config, layer.block, on_cpu=on_cpu)
        more = halves - gradient - activation_gradient_bytes(config, layer.block, on_cpu=on_cpu)
        first = 2 * inner + max(more, 0.0)
        return _FreedFirst(0.0 if more > 0 else min(gradient, inner), first, first)
    if layer.name == "embedding":
        summed = max(3.0 * ELEMENT_BYTES[config.precision.precision] * table - gradient, 0.0)
        return _FreedFirst(summed, summed, summed)
    logits = head_freed_bytes(config) if head else 0.0
    splits = config.parallel.may_split_backward
    stay = splits or _sums_take_products(config, layer, table, on_cpu=on_cpu)
    # The bucket of an output layer that is not tied waits for the gradient of the norm.
    is_alone = not config.model.untie_embeddings_and_output_weights
    arriving = gradient + (0.0 if stay and is_alone else logits)
    return _FreedFirst(0.0 if stay else logits, logits + gradient, arriving)


def _freed_before_copy(config: ResolvedConfig, layer: PlannedLayer, table: int, *, head: float) -> float:
    """Of what `_beside` counts that which is freed when a gradient of the head is copied into its buffer: the logits.
    Of a block the last gradients count, for which none of it is."""
    if layer.block is not None or layer.name == "embedding":
        return 0.0
    splits = config.parallel.may_split_backward and not config.model.untie_embeddings_and_output_weights
    return head_freed_bytes(config) if head and not splits else 0.0


def _freed_by_piece(
    config: ResolvedConfig,
    layer: PlannedLayer,
    parts: Sequence[Piece],
    freed_first: _FreedFirst,
    *,
    on_cpu: bool,
) -> Callable[[Held], float]:
    """Of what `_beside` counts, and of what a layer keeps, that which is freed when the gradient of a piece is added;
    or when it has been."""
    share = None if layer.block is None else expert_share(config, layer.block)
    if layer.block is not None and share is None and config.parallel.may_split_backward:
        of_mlp = pieces_of_mlp(layer.block, layer.block.inner_size, on_cpu=on_cpu)
        in_half, gradient = freed_in_weight_half(config, layer.block, of_mlp, on_cpu=on_cpu), freed_first.arriving
        return lambda held: in_half[min(held.piece, of_mlp)] + (gradient if held.arrived else 0.0)
    if layer.block is None or share is None or config.parallel.may_split_backward:
        with_first, arriving = freed_first.with_first, freed_first.arriving
        return lambda held: with_first if held.piece else arriving if held.arrived else 0.0
    by_experts = freed_by_experts(config, layer.block, on_cpu=on_cpu)
    shared = pieces_of_mlp(layer.block, share.experts.moe_shared_expert_size or 0, on_cpu=on_cpu)
    of_experts = sum(part.kind == "experts" for part in parts)

    e, ranks = ELEMENT_BYTES[config.precision.precision], ranks_of_role("layer", config.parallel)
    gradient, is_exact = gradient_bytes(config, layer, 0, on_cpu=on_cpu), config.training.reproducible
    of_others = gradient if is_exact else min(gradient, float(e * largest_product(layer.block, ranks)))

    def freed(held: Held) -> float:
        at = held.piece - shared
        early = 0.0 if at < 0 else by_experts[at] if at < of_experts else by_experts[-1] + gradient - of_others
        return early + (0.0 if not held.arrived else gradient if at < of_experts else of_others)

    return freed


def gradient_bytes(config: ResolvedConfig, layer: PlannedLayer, table: int, *, on_cpu: bool) -> float:
    """The largest gradient that one operator of a layer gives autograd."""
    if _sums_take_products(config, layer, table, on_cpu=on_cpu):
        return 0.0
    if _sums_take_rows(config, layer, table):
        return _rows_bytes(config, layer)
    e, largest = ELEMENT_BYTES[config.precision.precision], _largest_gradient(config, layer)
    share = None if layer.block is None else expert_share(config, layer.block)
    if share is not None and (on_cpu or e == ELEMENT_BYTES["fp32"]):
        # Experts multiply one by one: a product, and the tensor of all into which it is copied.
        largest = max(largest, share.matrix + share.matrix // share.held)
    # An exact sum takes it in fp64 and then as integers (zero/exact_sums.py).
    exact = 16.0 * _largest_gradient(config, layer) if config.training.reproducible else 0.0
    return e * largest + exact


def _largest_gradient(config: ResolvedConfig, layer: PlannedLayer) -> int:
    """Parameters of a layer whose gradients one operator gives at a time, the most; where the layer is not known, all
    of it."""
    ranks = ranks_of_role("layer", config.parallel)
    if layer.block is not None:
        share = expert_share(config, layer.block)
        return max(largest_product(layer.block, ranks), 0 if share is None else share.matrix)
    held = layer.parameters if layer.held is None else layer.held
    if not config.model.vocab_size:
        return held
    return min(held, max(vocabulary_rows(config.model, ranks) * config.model.hidden_size, layer.shared))


def _sums_take_products(config: ResolvedConfig, layer: PlannedLayer, table: int, *, on_cpu: bool) -> bool:
    """Whether products add the gradients of the layer's weights to sums in fp32, so that they never exist apart."""
    precision = config.precision
    sums = precision.precision != "fp32" and precision.grad_reduce_dtype == "fp32" and not config.training.reproducible
    is_product = layer.block is not None or (layer.name == "head" and not table)
    return sums and is_product and not on_cpu and not config.training.compile


def _sums_take_rows(config: ResolvedConfig, layer: PlannedLayer, table: int) -> bool:
    """Whether the rows of the token table that were read are added to its sum, so that its gradient never exists."""
    is_looked_up = layer.name == "embedding" and bool(config.model.vocab_size) and not table
    return is_looked_up and not config.training.reproducible


def _rows_bytes(config: ResolvedConfig, layer: PlannedLayer) -> float:
    """What exists at a time where rows are added to the sum of the token table: the gradients of the rows, also in the
    dtype of sums, and four indices of each token; or the gradient of the other table of the embedding."""
    e, summed = ELEMENT_BYTES[config.precision.precision], ELEMENT_BYTES[config.precision.grad_reduce_dtype]
    tokens, width = config.training.micro_batch_size * config.rank_positions, config.model.hidden_size
    row = width * (e + (summed if summed != e else 0)) + 4 * 8
    ranks = ranks_of_role("layer", config.parallel)
    held = layer.parameters if layer.held is None else layer.held
    others = held - vocabulary_rows(config.model, ranks) * width
    return max(float(tokens * row), float(e * max(others, 0)))
