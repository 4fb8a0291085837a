"""Gradients that ZeRO's stage 2 holds whole while backward runs: of a stage's layers, the buckets that are filled and
the one that is reduced, as data parallelism makes them (zero/flat.py, zero/data_parallel.py). Matrices that the
optimizer takes whole are in buckets apart. That of the other parameters then takes long to fill: a block has few.

A bucket is made for its first gradient. When its last one has arrived, and the buckets before it are reduced or being
reduced, its own reduction begins; it lasts until the next one begins.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.models.size import attention_matrices, short_matrices, vocabulary_rows
from megacore.plan.once import once_per_layers
from megacore.plan.state import PlannedLayer
from megacore.plan.whole_matrices import WholeBucket, joins_up_and_gate, weights

Kind = Literal["others", "experts", "apart"]
"""Whose buckets parameters share; each of `apart` has its own."""
_BYTES = 4  # of an element, when buckets are made


class Piece(NamedTuple):
    """Parameters of a layer whose gradients arrive together, and that are in one bucket.

    Attributes:
        size: their elements.
        kind: whose buckets they share.
        whole: how many they are if the optimizer takes them whole, else 0.
        beside: whether they arrive with those of the piece before.
    """

    size: int
    kind: Kind = "others"
    whole: int = 0
    beside: bool = False


class Held(NamedTuple):
    """Elements of the buckets that exist when the gradients of a piece are added, or when a reduction begins after it.

    Attributes:
        total: of all.
        made: of the one that is made for the piece; 0 where it exists.
        reduced: of the one that is being reduced, this rank's part, if it is added to an earlier one.
        piece: number of the piece in its layer; one that arrives with another has its number.
        arrived: whether the gradient has been added, and a reduction has begun.
        sharded: this rank's parts of all whose reductions have begun, if they are the first.
    """

    total: int
    made: int
    reduced: float
    piece: int = 0
    arrived: bool = False
    sharded: float = 0.0


class Unreduced(NamedTuple):
    """Of a stage.

    Attributes:
        by_layer: for each layer what exists at each of its pieces, in the order of backward.
        last: elements of the buckets that exist when the last gradient has arrived.
    """

    by_layer: Sequence[Sequence[Held]]
    last: int


def pieces(config: ResolvedConfig, layer: PlannedLayer, size: int, *, experts: bool, on_cpu: bool) -> tuple[Piece, ...]:
    """The parameters of a layer, the last used first.

    Args:
        config: a resolved configuration.
        layer: the layer.
        size: parameters of it that are reduced, without those that an earlier layer of the stage has.
        experts: whether those of experts are among them, in buckets of their own.
        on_cpu: whether the ranks compute in host memory.
    """
    if layer.block is None:
        ranks = ranks_of_role("layer", config.parallel)
        table = vocabulary_rows(config.model, ranks) * config.model.hidden_size if config.model.vocab_size else 0
        is_tied_apart = config.parallel.pp > 1 and not config.model.untie_embeddings_and_output_weights
        is_apart = table and is_tied_apart and layer.name in ("embedding", "head") and size >= table
        if is_apart or layer.name == "embedding":
            parts = Piece(table, "apart" if is_apart else "others"), Piece(size - table)
            return tuple(part for part in parts if part.size > 0)
        return (Piece(size),) if size else ()
    named = layer.name if config.optimizer_settings.takes_some_whole else ""
    return _of_block(config, layer.block, name=named, size=size, experts=experts, on_cpu=on_cpu)


@once_per_layers
def _of_block(
    config: ResolvedConfig, block: ResolvedModel, *, name: str, size: int, experts: bool, on_cpu: bool
) -> tuple[Piece, ...]:
    """`pieces` of a layer that is a block; `name`: where what the optimizer takes whole may depend on it."""
    found, joins, of_mlp = list[Piece](), False, 0
    for weight in weights(config, block, name, on_cpu=on_cpu):
        if weight.of_experts and not experts:
            continue
        piece = Piece(weight.size, "experts" if weight.of_experts else "others", int(weight.is_whole))
        if joins and (found[-1].whole > 0) == weight.is_whole:
            other = found.pop()
            piece = Piece(other.size + piece.size, piece.kind, other.whole + piece.whole)
        found.append(piece)
        joins = weight.is_joined
        of_mlp = len(found) if weight.name.startswith("mlp") else of_mlp
    # Vectors: the first norm's is the last one, and the first one is the last product's bias, or a norm's.
    vectors = size - sum(piece.size for piece in found)
    if (early := vectors - block.hidden_size) > 0:
        has_bias = block.mlp_bias and block.experts is None
        found.insert(1 if has_bias else of_mlp, Piece(early, beside=has_bias))
    return (*found, Piece(min(vectors, block.hidden_size)))


def pieces_of_mlp(block: ResolvedModel, inner: int, *, on_cpu: bool) -> int:
    """How many pieces an MLP of an inner width has; one without a width has none."""
    return 0 if not inner else 3 if block.gated and not joins_up_and_gate(block, on_cpu=on_cpu) else 2


def last_before_projections(parts: Sequence[Piece], block: ResolvedModel) -> int:
    """The number of the piece before those of the projections to queries, keys and values, which only one vector
    follows."""
    return sum(not part.beside for part in parts) - len(attention_matrices(block)) - len(short_matrices(block))


@functools.lru_cache(maxsize=256)  # a search asks for the same ones with other batches and recomputation
def unreduced(
    layers: tuple[tuple[Piece, ...], ...],
    limits: tuple[float, float],
    ranks: tuple[int, int],
    whole: tuple[WholeBucket, ...] = (),
    before: int = 0,
    sums: tuple[bool, bool] = (False, False),
) -> Unreduced:
    """What a stage holds while its backward runs.

    Args:
        layers: the pieces of each layer, as `pieces` has them.
        limits: bytes in fp32 at which a bucket is full, and one of experts.
        ranks: that share a bucket, and one of experts.
        whole: the buckets of matrices that the optimizer takes whole.
        before: elements of a bucket that is being reduced when backward begins.
        sums: whether the shard of that one is the first, which later ones are added to; and whether those of `layers`
            are.
    """
    last_first = [(number, piece) for number in reversed(range(len(layers))) for piece in layers[number]]
    parts = [piece for _, piece in last_first]
    bucket_of, sizes = _buckets(parts, dict(zip(("others", "experts"), limits, strict=True)), whole)
    missing, held = Counter(bucket_of), {-1: before}
    added, new = {-1: 0.0 if sums[0] else before / ranks[0]}, {-1: 0.0}  # of shards: added to another, or stays
    reduced, due, sharded = -1, 0, 0.0
    found: list[list[Held]] = [[] for _ in layers]
    places = [place for layer in reversed(layers) for place in accumulate(not one.beside for one in layer)]
    for (number, piece), bucket, place in zip(last_first, bucket_of, places, strict=True):
        made = 0 if bucket in held else sizes[bucket]
        held[bucket] = sizes[bucket]
        shard = sizes[bucket] / ranks[piece.kind == "experts"]
        added[bucket], new[bucket] = (0.0, shard) if sums[1] else (shard, 0.0)
        found[number].append(Held(sum(held.values()), made, added[reduced], place - 1, False, sharded))
        missing[bucket] -= 1
        before_it = reduced
        while due < len(sizes) and not missing[due]:
            del held[reduced]
            reduced, due = due, due + 1
            sharded += new[reduced]
        if reduced != before_it:
            found[number].append(Held(sum(held.values()), 0, added[reduced], place - 1, True, sharded))
    return Unreduced(found, sum(held.values()))


def _buckets(
    last_first: Sequence[Piece], limits: dict[str, float], whole: Sequence[WholeBucket]
) -> tuple[list[int], list[int]]:
    """For each piece the number of its bucket, and the size of each bucket; as `zero.flat.assign_buckets`, and where
    there are `whole` ones as `zero.flat.assign_whole`: then by the first use of each."""
    members = _split(last_first, limits)
    sized = [(bucket, sum(last_first[at].size for at in bucket)) for bucket in members]
    if whole:
        taken = {kind: [at for at, one in enumerate(last_first) if one.whole and one.kind == kind] for kind in limits}
        for of_whole in whole:
            ats, missing = list[int](), of_whole.matrices
            left = taken["experts" if of_whole.of_experts else "others"]
            while missing > 0:
                missing -= last_first[left[0]].whole
                ats.append(left.pop(0))
            sized.append((ats, of_whole.size))
        sized.sort(key=lambda pair: pair[0][-1])
    number_of = {at: number for number, (bucket, _) in enumerate(sized) for at in bucket}
    return [number_of[at] for at in range(len(last_first))], [size for _, size in sized]


def _split(last_first: Sequence[Piece], limits: dict[str, float], *, mixes: bool = False) -> list[list[int]]:
    """The numbers of the pieces in each bucket of those that shards may split; `mixes`: and of the others."""
    members, unfinished, taken = list[list[int]](), dict[Kind, list[int]](), Counter[Kind]()  # bytes so far
    for at, piece in enumerate(last_first):
        if piece.whole and not mixes:
            continue
        kind, size = piece.kind, _BYTES * piece.size
        if kind == "apart" or (kind not in unfinished and size >= limits[kind]):
            members.append([at])
            continue
        unfinished.setdefault(kind, []).append(at)
        taken[kind] += size
        if taken[kind] >= limits[kind]:
            members.append(unfinished.pop(kind))
            taken[kind] = 0
    return [*members, *unfinished.values()]


@functools.lru_cache(maxsize=16)  # ways out ask for the same ones with other batches and recomputation
def bucket_members(
    layers: tuple[tuple[Piece, ...], ...], limits: tuple[float, float], *, mixes: bool
) -> list[list[Piece]]:
    """The pieces in each bucket of a stage.

    Args:
        layers: the pieces of each layer, as `pieces` has them.
        limits: as `unreduced` has them.
        mixes: whether those that the optimizer takes whole are among the others; else they are left out.
    """
    last_first = [piece for layer in reversed(layers) for piece in layer]
    split = _split(last_first, dict(zip(("others", "experts"), limits, strict=True)), mixes=mixes)
    return [[last_first[at] for at in members] for members in split]
