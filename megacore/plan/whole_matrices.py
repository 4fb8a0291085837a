"""The matrices that an optimizer such as Muon takes whole: their buckets, as data parallelism makes them, and which
rank computes the direction of which (optim/whole_matrices.py).

Those of experts have buckets of their own, which the ranks that hold copies of them shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megacore.config import ParallelConfig, ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.config.optimizers import OptimizerSettings
from megacore.models.outline import ModelLayer
from megacore.models.size import attention_matrices, short_matrices
from megacore.plan.shared_results import once_per
from megacore.plan.state import expert_copies, expert_share, held_by_layer, zero_stage
from megacore.zero.packing import bucket_ends, exchange, grown, pack

_ALIGNMENT = 32  # elements of which every parameter begins at a multiple


class Updated(NamedTuple):
    """What one rank of a stage updates.

    Attributes:
        whole: elements of matrices taken whole, without padding.
        others: elements of other parameters, without padding.
        factors: bytes of what the optimizer keeps of rows and columns of the matrices.
    """

    whole: float
    others: float
    factors: float


@dataclass(frozen=True, kw_only=True)
class WholeState:
    """What the ranks of a pipeline stage keep where an optimizer takes matrices whole.

    Attributes:
        padding: elements of the buckets of all ranks that belong to no parameter, without those of experts.
        expert_padding: the same of experts.
        updated: by the number of a rank in its stage; ranks from the last on repeat the first.
    """

    padding: int
    expert_padding: int
    updated: Sequence[Updated]


def whole_state(
    config: ResolvedConfig, chunks: Sequence[Sequence[ModelLayer]], *, parameters: int, experts: int, on_cpu: bool
) -> WholeState:
    """What the ranks of a stage keep.

    Args:
        config: a resolved configuration.
        chunks: the layers of each stage of a pipeline rank.
        parameters: that it holds.
        experts: how many of them are of experts.
        on_cpu: whether the ranks compute in host memory.
    """
    if zero_stage(config) == 0:
        matrices = [matrix for chunk in chunks for _, matrix in of_chunk(config, chunk, on_cpu=on_cpu)]
        held = sum(matrix.size for matrix in matrices)
        updated = Updated(held, parameters - held, sum(matrix.factors for matrix in matrices))
        return WholeState(padding=0, expert_padding=0, updated=[updated])
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    whole, padding = {False: [0] * shards, True: [0] * copies}, {False: 0, True: 0}
    factors = {False: [0.0] * shards, True: [0.0] * copies}
    beside = [0] * shards  # elements in front of matrices, which shards split
    for bucket, places in _placed(config, chunks, on_cpu=on_cpu):
        for matrix, rank in zip(bucket.matrices, places, strict=True):
            whole[bucket.of_experts][rank] += matrix.size
            factors[bucket.of_experts][rank] += matrix.factors
        padding[bucket.of_experts] += bucket.padding
        for rank in range(bucket.fixed):
            beside[rank] += min(bucket.taken - rank * bucket.shard_size, bucket.shard_size)
    dense, of_experts = whole[False], whole[True]
    even = (parameters - experts - sum(dense) - sum(beside)) / shards + (experts - sum(of_experts)) / copies
    pairs = _ranks_of_stage(config.parallel)
    return WholeState(
        padding=padding[False],
        expert_padding=padding[True],
        updated=[
            Updated(
                dense[one] + of_experts[other], even + beside[one], factors=factors[False][one] + factors[True][other]
            )
            for one, other in pairs
        ],
    )


class Directions(NamedTuple):
    """Elements of what the ranks of a stage send of the directions in which an update moves matrices.

    Attributes:
        gathered: by replicas on ZeRO's stage 0, each of which computes a part, with padding.
        of_experts: the same of experts, by the ranks that hold copies of them.
        joined: slices that a rank sends to be joined, and gets back; the mean over the ranks.
    """

    gathered: int = 0
    of_experts: int = 0
    joined: float = 0.0


@once_per("state")
def directions(config: ResolvedConfig, chunk: Sequence[ModelLayer]) -> Directions:
    """What is sent of the layers of a pipeline stage, of ZeRO's stages 0 to 2."""
    if not config.optimizer_settings.joins_slices:
        return Directions()
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    is_cut, is_expert_cut = ranks_of_role("layer", config.parallel) > 1, config.parallel.expert_split > 1
    matrices = [matrix for _, matrix in of_chunk(config, chunk, on_cpu=False)]
    joined = sum(m.size for m in matrices if is_cut and m.is_cut and not m.of_expert) / shards
    joined += sum(m.size for m in matrices if is_expert_cut and m.of_expert) / copies
    if zero_stage(config) > 0 or shards == copies == 1:
        return Directions(joined=joined)
    buckets = list(update_buckets(config, chunk, on_cpu=False))
    return Directions(
        gathered=sum(bucket.size for bucket in buckets if not bucket.of_experts) if shards > 1 else 0,
        of_experts=sum(bucket.size for bucket in buckets if bucket.of_experts) if copies > 1 else 0,
        joined=joined,
    )


def busiest_seconds(
    config: ResolvedConfig,
    chunks: Sequence[Sequence[ModelLayer]],
    seconds: Callable[[Product], float],
    *,
    on_cpu: bool,
) -> float:
    """How long the rank that computes most needs for the directions of its matrices.

    A matrix is computed once among its replicas: where its state is, or on ZeRO's stage 0 by one of them. Ranks that
    hold slices of the same matrices compute as many at a time as they are, and wait for the largest.

    Args:
        config: a resolved configuration.
        chunks: the layers of each stage of a pipeline rank.
        seconds: of a matrix, or of several in one product.
        on_cpu: whether the ranks compute in host memory.
    """
    parallel = config.parallel
    t, split = ranks_of_role("layer", parallel), parallel.expert_split
    busy = {False: [0.0] * shard_ranks(parallel), True: [0.0] * expert_copies(parallel)}
    for bucket, places in _placed(config, chunks, on_cpu=on_cpu):
        group, ranks = split if bucket.of_experts else t, busy[bucket.of_experts]
        at_once = group if zero_stage(config) or len(ranks) == 1 else len(bucket.matrices)
        of_rank: list[list[Matrix]] = [[] for _ in ranks]
        for matrix, rank in zip(bucket.matrices, places, strict=True):
            of_rank[rank].append(matrix)
        for rank, held in enumerate(of_rank):
            ranks[rank] += _seconds_in_turn(held, group, at_once, seconds)
    return max(busy[False][one] + busy[True][other] for one, other in set(_ranks_of_stage(parallel)))


def _placed(
    config: ResolvedConfig, chunks: Sequence[Sequence[ModelLayer]], *, on_cpu: bool
) -> Iterator[tuple[_Bucket, list[int]]]:
    """The buckets with matrices of a pipeline rank, in the order in which they are made, each with the number of the
    replica that updates each matrix."""
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    work = {False: [0.0] * shards, True: [0.0] * copies}
    for chunk in chunks:
        for bucket in update_buckets(config, chunk, on_cpu=on_cpu):
            works, ranks = [matrix.work for matrix in bucket.matrices], work[bucket.of_experts]
            places = exchange(bucket.shard_of, works, ranks, fixed=bucket.fixed)
            for one, rank in zip(works, places, strict=True):
                ranks[rank] += one
            yield bucket, places


def _ranks_of_stage(parallel: ParallelConfig) -> Sequence[tuple[int, int]]:
    """Of each rank of a stage its number among the ranks that shard, and among those that hold copies of experts."""
    t, of_experts = ranks_of_role("layer", parallel), parallel.ep * parallel.expert_split
    shards, copies = shard_ranks(parallel), expert_copies(parallel)
    return [
        (member // t % shards, member // of_experts % copies) for member in range(max(shards * t, copies * of_experts))
    ]


def _seconds_in_turn(
    matrices: Sequence[Matrix], ranks: int, at_once: int, seconds: Callable[[Product], float]
) -> float:
    """Of matrices whose slices so many ranks hold, each computed by one of them; slices of `at_once` are given
    together."""
    total = 0.0
    for first in range(0, len(matrices), at_once):
        timed = [(matrix, sum(map(seconds, matrix.products))) for matrix in matrices[first : first + at_once]]
        cut = [time for matrix, time in timed if matrix.is_cut]
        total += sum(max(cut[begin : begin + ranks]) for begin in range(0, len(cut), ranks))
        total += sum(time for matrix, time in timed if not matrix.is_cut)
    return total


def update_buckets(config: ResolvedConfig, chunk: Sequence[ModelLayer], *, on_cpu: bool) -> Iterator[_Bucket]:
    """The buckets with matrices of a stage, one after the other as they are made."""
    if zero_stage(config) == 3:
        yield from (bucket for _, bucket in _layer_buckets(config, chunk, on_cpu=on_cpu))
        return
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    matrices = of_chunk(config, chunk, on_cpu=on_cpu)
    (held,) = held_by_layer([chunk])
    # Bytes of fp32 that fill a bucket: as given, or a quarter of the stage, at four bytes for each parameter.
    limit = min(int(config.parallel.bucket_size_mb * 2**20), sum(held))
    if shards == copies == 1:
        yield from (_bucket(members, 1) for members in _among_others(matrices, held, limit))
        return
    for kind, ranks in ((False, shards), (True, copies)):
        alike = tuple(matrix for _, matrix in matrices if matrix.of_expert == kind)
        yield from _buckets(alike, ranks, limit)


def _layer_buckets(
    config: ResolvedConfig, chunk: Sequence[ModelLayer], *, on_cpu: bool
) -> Iterator[tuple[int, _Bucket]]:
    """Those of ZeRO's stage 3, each of one layer: its number, and the bucket. The first layer comes first."""
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    (held,) = held_by_layer([chunk])
    for number, inside in reversed(_by_layer(of_chunk(config, chunk, on_cpu=on_cpu)).items()):
        beside = held[number] - sum(matrix.size for matrix in inside)
        beside -= _divided_experts(config, chunk[number], on_cpu=on_cpu)  # they have a bucket of their own
        for kind, ranks, taken in ((False, shards, beside), (True, copies, 0)):
            if members := tuple(matrix for matrix in inside if matrix.of_expert == kind):
                yield number, _bucket(members, ranks, -(-taken // _ALIGNMENT) * _ALIGNMENT)


def _divided_experts(config: ResolvedConfig, layer: ModelLayer, *, on_cpu: bool) -> int:
    """Elements of a layer's experts that the optimizer does not take whole."""
    if layer.block is None:
        return 0
    found = _of_block(config, layer.block, on_cpu=on_cpu)
    taken = _taken_whole(config.optimizer_settings, layer.name, tuple(found))
    pairs = zip(found, taken, strict=True)
    return sum(one.size for one, is_whole in pairs if one.of_expert and not is_whole)


def _among_others(
    matrices: Sequence[tuple[int, Matrix]], held: Sequence[int], limit: int
) -> Iterator[tuple[Matrix, ...]]:
    """The matrices of each bucket where all parameters of a layer follow each other: a bucket is full at `limit`
    bytes. The few vectors of a block count with its last matrix.

    Args:
        matrices: with the numbers of their layers, the last used first.
        held: parameters of each layer.
        limit: of a bucket.
    """
    by_layer = _by_layer(matrices)
    for kind in (False, True):
        members, size = list[Matrix](), 0
        for number in reversed(range(len(held))):
            inside = by_layer.get(number, [])
            others = 0 if kind else held[number] - sum(matrix.size for matrix in inside)
            for matrix in (*(one for one in inside if one.of_expert == kind), None):
                members += [] if matrix is None else [matrix]
                size += 4 * (others if matrix is None else matrix.size)
                if size >= limit and (matrix is None or not matrix.is_joined):
                    if members:
                        yield tuple(members)
                    members, size = [], 0
        if members:
            yield tuple(members)


def _by_layer(matrices: Iterable[tuple[int, Matrix]]) -> dict[int, list[Matrix]]:
    """Matrices by the number of their layer."""
    found: dict[int, list[Matrix]] = {}
    for layer, matrix in matrices:
        found.setdefault(layer, []).append(matrix)
    return found


def of_chunk(config: ResolvedConfig, chunk: Sequence[ModelLayer], *, on_cpu: bool) -> list[tuple[int, Matrix]]:
    """The matrices of a stage, each with the number of its layer, the last used first."""
    return [
        (number, matrix)
        for number in reversed(range(len(chunk)))
        if (block := chunk[number].block) is not None
        for matrix in _matrices(config, block, chunk[number].name, on_cpu=on_cpu)
    ]


class Product(NamedTuple):
    """Matrices of one shape that are computed together."""

    number: int
    rows: int
    columns: int


class Matrix(NamedTuple):
    """A weight of a block that an optimizer may take whole, on one rank.

    Attributes:
        name: in its block.
        shape: of the whole.
        size: elements.
        work: of its update, in the optimizer's unit.
        products: what it consists of where its slices are joined.
        of_expert: whether it is of experts, which fewer ranks hold copies of.
        is_joined: whether it stays in one bucket with the next one.
        is_cut: whether tensor-parallel ranks split it, where there are any.
        factors: bytes that the optimizer keeps of its rows and columns.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    work: float
    products: tuple[Product, ...]
    of_expert: bool = False
    is_joined: bool = False
    is_cut: bool = True
    factors: float = 0.0


class _Bucket(NamedTuple):
    """A bucket: elements with padding, those of a shard, those before its matrices, padding, its matrices with the
    shard of each, and how many shards, the first ones, have no choice of a rank."""

    size: int
    shard_size: int
    taken: int
    padding: int
    of_experts: bool
    matrices: Sequence[Matrix]
    shard_of: Sequence[int]
    fixed: int


@functools.lru_cache(maxsize=256)  # a search asks for the same ones with other batches and recomputation
def _buckets(matrices: tuple[Matrix, ...], shards: int, limit: int) -> tuple[_Bucket, ...]:
    """The buckets of matrices over so many shards.

    Args:
        matrices: the last used first.
        shards: number of shards.
        limit: bytes of a bucket in a small replica group.
    """
    aligned = [_aligned(matrix) for matrix in matrices]
    joined = {number for number, matrix in enumerate(matrices) if matrix.is_joined}
    ends = bucket_ends(aligned, shards, least=grown(limit, shards) // 4, joined=joined)
    return tuple(_bucket(matrices[begin:end], shards) for begin, end in pairwise([0, *ends]))


def weights_taken_whole(config: ResolvedConfig, layer: ModelLayer) -> tuple[bool, ...]:
    """Equal for layers of one kind that the optimizer treats alike, which may depend on their names."""
    if layer.block is None or not config.optimizer_settings.takes_some_whole:
        return ()
    return _taken_whole(config.optimizer_settings, layer.name, tuple(_of_block(config, layer.block, on_cpu=False)))


@functools.lru_cache(maxsize=256)
def _bucket(matrices: tuple[Matrix, ...], shards: int, taken: int = 0) -> _Bucket:
    """A bucket of matrices; `taken`: elements before them that shards may split."""
    packing = pack([_aligned(matrix) for matrix in matrices], shards, taken=taken, unit=_ALIGNMENT)
    size = shards * packing.shard_size
    return _Bucket(
        size=size,
        shard_size=packing.shard_size,
        taken=taken,
        padding=size - taken - sum(matrix.size for matrix in matrices),
        of_experts=matrices[0].of_expert,
        matrices=matrices,
        shard_of=packing.shard_of,
        fixed=-(-taken // max(packing.shard_size, 1)),
    )


def _aligned(matrix: Matrix) -> int:
    return -(-matrix.size // _ALIGNMENT) * _ALIGNMENT


@once_per("layers")
def _matrices(config: ResolvedConfig, block: ResolvedModel, name: str, *, on_cpu: bool) -> list[Matrix]:
    """A block's matrices on one rank that the optimizer takes whole, the last used first."""
    found = _of_block(config, block, on_cpu=on_cpu)
    if int(name.rpartition(".")[2]) >= config.model.num_layers:  # the join of multi-token prediction, which comes first
        shape, settings = (block.hidden_size, 2 * block.hidden_size), config.optimizer_settings
        work, factors, made = settings.work_of(shape), settings.factor_bytes(shape), (Product(1, *shape),)
        found = [*found, Matrix("join", shape, math.prod(shape), work, made, factors=factors, is_cut=False)]
    taken = _taken_whole(config.optimizer_settings, name, tuple(found))
    return [one for one, is_taken in zip(found, taken, strict=True) if is_taken]


@functools.lru_cache(maxsize=1024)  # of each block, for all layouts
def _taken_whole(settings: OptimizerSettings, block: str, found: tuple[Matrix, ...]) -> tuple[bool, ...]:
    """Which weights of a block the optimizer takes whole."""
    return tuple(settings.takes_whole(f"{block}.{one.name}.weight", one.shape) for one in found)


@once_per("layers")
def _of_block(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> list[Matrix]:
    """The weights of a block that an optimizer may take whole, the last used first."""
    ranks, settings = ranks_of_role("layer", config.parallel), config.optimizer_settings
    inner, h, share = block.inner_size, block.hidden_size, expert_share(config, block)
    mlp, found = "mlp", list[Matrix]()
    if share is not None:
        inner, mlp = share.experts.moe_shared_expert_size or 0, "mlp.shared"
    into = ["up", "gate"] if block.gated else ["up"]
    # One product gives the gradients of up and gate.
    joins = block.activation == "swiglu" and not block.mlp_bias and not on_cpu

    def add(part: str, shape: tuple[int, ...], held: int, *products: Product, **how: bool) -> None:
        local = (held // math.prod(shape[1:]), *shape[1:])  # as many rows; no optimizer has factors of slices
        factors = settings.factor_bytes(local)
        made = products or (Product(1, *shape[-2:]),)
        found.append(Matrix(part, shape, held, settings.work_of(shape), made, factors=factors, **how))

    if inner:
        add(f"{mlp}.down", (h, inner), h * inner // ranks)
        for kind in into:
            add(f"{mlp}.{kind}", (inner, h), h * inner // ranks, is_joined=joins and kind == "up")
    if share is not None:
        number, width = share.experts.num_experts, share.experts.moe_ffn_hidden_size
        add("mlp.experts.down", (number, h, width), share.matrix, Product(share.held, h, width), of_expert=True)
        for kind in into:
            add(f"mlp.experts.{kind}", (number, width, h), share.matrix, Product(share.held, width, h), of_expert=True)
        add("mlp.router", (number, h), number * h, is_cut=False)
    for part, shape in reversed(attention_matrices(block).items()):
        products = _of_qkv(block, settings.split_qkv) if part == "qkv" else ()
        add(f"attention.{part}", shape, math.prod(shape) // ranks, *products)
    for shape in short_matrices(block):
        add("attention", shape, math.prod(shape), is_cut=False)
    return found


def _of_qkv(block: ResolvedModel, split: str) -> list[Product]:
    """What the optimizer takes as one matrix in the projection to queries, keys and values; none: all of it."""
    heads, groups, d, h = block.num_attention_heads, block.query_groups, block.head_size, block.hidden_size
    if split == "heads":
        return [Product(heads + 2 * groups, d, h)]
    return [Product(1, number * d, h) for number in (heads, groups, groups)] if split == "qkv" else []
