"""Gradients that ZeRO's stage 2 holds whole while backward runs: of a stage's layers, the buckets that are filled and
the one that is reduced, as data parallelism makes them (zero/flat.py, zero/data_parallel.py).

A bucket is made for its first gradient. When its last one has arrived, and the buckets before it are reduced or being
reduced, its own reduction begins; it lasts until the next one begins.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.plan.experts import expert_share
from megacore.plan.model_size import attention_matrices, short_matrices, vocabulary_rows
from megacore.plan.state import PlannedLayer
from megacore.plan.whole_matrices import matrices_taken_whole

Kind = Literal["others", "experts", "apart"]
"""Whose buckets parameters share; each of `apart` has its own."""
_BYTES = 4  # of an element, when buckets are made


class Piece(NamedTuple):
    """Parameters of a layer whose gradients arrive together, and that are in one bucket: their elements."""

    size: int
    kind: Kind = "others"


class Held(NamedTuple):
    """Elements of the buckets that exist when the gradients of a piece are added, or when a reduction begins after it.

    Attributes:
        total: of all.
        made: of the one that is made for the piece; 0 where it exists.
        reduced: of the one that is being reduced, this rank's part, if it is added to an earlier one.
        piece: number of the piece in its layer.
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
    """The parameters of a layer, the last used first, without matrices that the optimizer takes whole.

    Args:
        config: a resolved configuration.
        layer: the layer.
        size: parameters of it that are reduced, without those that an earlier layer of the stage has.
        experts: whether those of experts are among them, in buckets of their own.
        on_cpu: whether the ranks compute in host memory.
    """
    ranks = ranks_of_role("layer", config.parallel)
    if whole := sum(m.size for m in matrices_taken_whole(config, layer) if experts or not m.of_expert):
        return (Piece(size - whole),) if size > whole else ()
    if layer.block is None:
        table = vocabulary_rows(config.model, ranks) * config.model.hidden_size if config.model.vocab_size else 0
        is_tied_apart = config.parallel.pp > 1 and not config.model.untie_embeddings_and_output_weights
        is_apart = table and is_tied_apart and layer.name in ("embedding", "head") and size >= table
        if is_apart or layer.name == "embedding":
            parts = Piece(table, "apart" if is_apart else "others"), Piece(size - table)
            return tuple(part for part in parts if part.size > 0)
        return (Piece(size),) if size else ()
    block, share = layer.block, expert_share(config, layer.block)
    inner = block.inner_size
    if share is not None:
        inner = share.experts.moe_shared_expert_size or 0
    matrix = block.hidden_size * inner // ranks
    into = [2 * matrix] if _joins(block, on_cpu=on_cpu) else [matrix] * (2 if block.gated else 1)
    found = [Piece(n) for n in (matrix, *into) if n]
    if share is not None and experts:
        found += [Piece(share.matrix, "experts")] * share.matrices
    split = [math.prod(shape) // ranks for shape in reversed(attention_matrices(block))]
    found += [Piece(n) for n in (*split, *map(math.prod, short_matrices(block)))]
    # Vectors and a router; the first norm's is the last one.
    return (*found, Piece(size - sum(piece.size for piece in found)))


def pieces_of_mlp(block: ResolvedModel, inner: int, *, on_cpu: bool) -> int:
    """How many pieces an MLP of an inner width has; one without a width has none."""
    return 0 if not inner else 3 if block.gated and not _joins(block, on_cpu=on_cpu) else 2


def _joins(block: ResolvedModel, *, on_cpu: bool) -> bool:
    """Whether one product gives the gradients of gate and up."""
    return block.activation == "swiglu" and not block.mlp_bias and not on_cpu


@functools.lru_cache(maxsize=256)  # a search asks for the same ones with other batches and recomputation
def unreduced(
    layers: tuple[tuple[Piece, ...], ...],
    limits: tuple[float, float],
    ranks: tuple[int, int],
    before: int = 0,
    sums: tuple[bool, bool] = (False, False),
) -> Unreduced:
    """What a stage holds while its backward runs.

    Args:
        layers: the pieces of each layer, as `pieces` has them.
        limits: bytes in fp32 at which a bucket is full, and one of experts.
        ranks: that share a bucket, and one of experts.
        before: elements of a bucket that is being reduced when backward begins.
        sums: whether the shard of that one is the first, which later ones are added to; and whether those of `layers`
            are.
    """
    last_first = [(number, piece) for number in reversed(range(len(layers))) for piece in layers[number]]
    bucket_of, sizes = _buckets(
        [piece for _, piece in last_first], dict(zip(("others", "experts"), limits, strict=True))
    )
    missing, held = Counter(bucket_of), {-1: before}
    added, new = {-1: 0.0 if sums[0] else before / ranks[0]}, {-1: 0.0}  # of shards: added to another, or stays
    reduced, due, sharded = -1, 0, 0.0
    found: list[list[Held]] = [[] for _ in layers]
    places = [place for layer in reversed(layers) for place in range(len(layer))]
    for (number, piece), bucket, place in zip(last_first, bucket_of, places, strict=True):
        made = 0 if bucket in held else sizes[bucket]
        held[bucket] = sizes[bucket]
        shard = sizes[bucket] / ranks[piece.kind == "experts"]
        added[bucket], new[bucket] = (0.0, shard) if sums[1] else (shard, 0.0)
        found[number].append(Held(sum(held.values()), made, added[reduced], place, False, sharded))
        missing[bucket] -= 1
        before_it = reduced
        while due < len(sizes) and not missing[due]:
            del held[reduced]
            reduced, due = due, due + 1
            sharded += new[reduced]
        if reduced != before_it:
            found[number].append(Held(sum(held.values()), 0, added[reduced], place, True, sharded))
    return Unreduced(found, sum(held.values()))


def _buckets(last_first: Sequence[Piece], limits: dict[str, float]) -> tuple[list[int], list[int]]:
    """For each piece the number of its bucket, and the size of each bucket; as `zero.flat.assign_buckets`."""
    members, unfinished = list[list[int]](), dict[Kind, list[int]]()
    for at, piece in enumerate(last_first):
        if piece.kind == "apart":
            members.append([at])
            continue
        bucket = unfinished.setdefault(piece.kind, [])
        bucket.append(at)
        if _BYTES * sum(last_first[other].size for other in bucket) >= limits[piece.kind]:
            members.append(unfinished.pop(piece.kind))
    members += unfinished.values()
    number_of = {at: number for number, bucket in enumerate(members) for at in bucket}
    sizes = [sum(last_first[at].size for at in bucket) for bucket in members]
    return [number_of[at] for at in range(len(last_first))], sizes
