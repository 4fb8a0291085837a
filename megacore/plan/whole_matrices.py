"""Buckets of the matrices that an optimizer such as Muon takes whole, as data parallelism makes them.

Those of experts have buckets of their own, which the ranks that hold copies of them shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.plan.buckets import grown
from megacore.plan.experts import expert_copies, expert_share
from megacore.plan.model_size import attention_matrices, short_matrices
from megacore.plan.packing import bucket_ends, pack
from megacore.plan.state import PlannedLayer, held_by_layer, zero_stage

_ALIGNMENT = 32  # elements of which every parameter begins at a multiple


@dataclass(frozen=True, kw_only=True)
class WholeBuckets:
    """The buckets of a pipeline stage.

    Attributes:
        size: elements of each, padding included, the last used first.
        padding: elements of all that belong to no parameter, without those of experts.
        expert_padding: the same of experts.
        of_layer: by the number of a layer, the numbers of the buckets that hold its matrices; none where it has none.
    """

    size: Sequence[int] = ()
    padding: int = 0
    expert_padding: int = 0
    of_layer: Sequence[Sequence[int]] = ()

    def unreduced(self, layer: int) -> tuple[int, int]:
        """While backward is in a layer with matrices: elements of the bucket that is filled and of the one before it,
        which is being reduced, where these are most."""
        pairs = ((self.size[number], self.size[number - 1] if number else 0) for number in self.of_layer[layer])
        return max(pairs, key=sum)


def whole_buckets(config: ResolvedConfig, chunk: Sequence[PlannedLayer], *, on_cpu: bool) -> WholeBuckets:
    """The buckets of a pipeline stage.

    Args:
        config: a resolved configuration, of ZeRO's stages 0 to 2.
        chunk: the layers of the stage.
        on_cpu: whether the ranks compute in host memory.
    """
    shards = shard_ranks(config.parallel) if config.parallel.zero_stage else 1
    copies = expert_copies(config.parallel) if config.parallel.zero_stage else 1
    buckets = list(_all_buckets(config, chunk, on_cpu=on_cpu, shards=shards, copies=copies))
    buckets.sort(key=lambda bucket: bucket.last)
    of_layer = [[n for n, bucket in enumerate(buckets) if number in bucket.layers] for number in range(len(chunk))]
    return WholeBuckets(
        size=[bucket.size for bucket in buckets],
        padding=sum(bucket.padding for bucket in buckets if not bucket.of_experts),
        expert_padding=sum(bucket.padding for bucket in buckets if bucket.of_experts),
        of_layer=of_layer,
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


def directions(config: ResolvedConfig, chunk: Sequence[PlannedLayer]) -> Directions:
    """What is sent of the layers of a pipeline stage; arguments as for `whole_buckets`."""
    if not config.optimizer_settings.joins_slices:
        return Directions()
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    is_cut, is_expert_cut = ranks_of_role("layer", config.parallel) > 1, config.parallel.expert_split > 1
    matrices = [matrix for _, matrix in _of_chunk(config, chunk, on_cpu=False)]
    joined = sum(m.size for m in matrices if is_cut and m.is_cut and not m.of_expert) / shards
    joined += sum(m.size for m in matrices if is_expert_cut and m.of_expert) / copies
    if zero_stage(config) > 0:
        return Directions(joined=joined)
    buckets = list(_all_buckets(config, chunk, on_cpu=False, shards=shards, copies=copies))
    return Directions(
        gathered=sum(bucket.size for bucket in buckets if not bucket.of_experts) if shards > 1 else 0,
        of_experts=sum(bucket.size for bucket in buckets if bucket.of_experts) if copies > 1 else 0,
        joined=joined,
    )


def _of_chunk(config: ResolvedConfig, chunk: Sequence[PlannedLayer], *, on_cpu: bool) -> list[tuple[int, _Matrix]]:
    """The matrices of a stage, each with the number of its layer, the last used first."""
    return [
        (number, matrix)
        for number in reversed(range(len(chunk)))
        if (block := chunk[number].block) is not None
        for matrix in _matrices(config, block, chunk[number].name, on_cpu=on_cpu)
    ]


def _all_buckets(
    config: ResolvedConfig, chunk: Sequence[PlannedLayer], *, on_cpu: bool, shards: int, copies: int
) -> Iterator[_Bucket]:
    """Those of matrices that all replicas hold, and those of experts that some of them hold."""
    (held,) = held_by_layer([chunk])
    limit = min(int(config.parallel.bucket_size_mb * 2**20), sum(held))
    matrices = _of_chunk(config, chunk, on_cpu=on_cpu)
    yield from _buckets([(at, *one) for at, one in enumerate(matrices) if not one[1].of_expert], shards, limit)
    if copies > 1:
        yield from _buckets([(at, *one) for at, one in enumerate(matrices) if one[1].of_expert], copies, limit)


class _Matrix(NamedTuple):
    """A matrix of a block on one rank.

    Attributes:
        size: elements.
        of_expert: whether it is of experts, which fewer ranks hold copies of.
        is_joined: whether it stays in one bucket with the next one.
        is_cut: whether tensor-parallel ranks split it, where there are any.
    """

    size: int
    of_expert: bool = False
    is_joined: bool = False
    is_cut: bool = True


class _Bucket(NamedTuple):
    """A bucket: elements with padding, padding, the place of its last matrix, and the layers of its matrices."""

    size: int
    padding: int
    last: int
    layers: frozenset[int]
    of_experts: bool


def _buckets(matrices: Sequence[tuple[int, int, _Matrix]], shards: int, limit: int) -> Iterator[_Bucket]:
    """The buckets of matrices, each with its place and its layer, over so many shards."""
    aligned = [-(-matrix.size // _ALIGNMENT) * _ALIGNMENT for _, _, matrix in matrices]
    joined = {number for number, (_, _, matrix) in enumerate(matrices) if matrix.is_joined}
    ends = [len(matrices)] if matrices else []
    if shards > 1:
        ends = bucket_ends(aligned, shards, least=grown(limit, shards) // 4, joined=joined)
    for begin, end in pairwise([0, *ends]):
        size = shards * pack(aligned[begin:end], shards).shard_size
        inside = matrices[begin:end]
        yield _Bucket(
            size=size,
            padding=size - sum(matrix.size for _, _, matrix in inside),
            last=inside[-1][0],
            layers=frozenset(layer for _, layer, _ in inside),
            of_experts=inside[0][2].of_expert,
        )


def matrices_taken_whole(config: ResolvedConfig, layer: PlannedLayer) -> tuple[_Matrix, ...]:
    """Equal for layers of one kind that the optimizer treats alike, which may depend on their names."""
    if layer.block is None or not config.optimizer_settings.takes_some_whole:
        return ()
    return tuple(_matrices(config, layer.block, layer.name, on_cpu=False))


def _matrices(config: ResolvedConfig, block: ResolvedModel, name: str, *, on_cpu: bool) -> list[_Matrix]:
    """A block's matrices on one rank that the optimizer takes whole, the last used first."""
    ranks, takes_whole = ranks_of_role("layer", config.parallel), config.optimizer_settings.takes_whole
    inner, h, share = block.inner_size, block.hidden_size, expert_share(config, block)
    mlp, found = "mlp", list[_Matrix]()
    if share is not None:
        inner, mlp = share.experts.moe_shared_expert_size or 0, "mlp.shared"
    into = ["up", "gate"] if block.gated else ["up"]
    joins = block.activation == "swiglu" and not block.mlp_bias and share is None and not on_cpu

    def add(part: str, shape: tuple[int, ...], held: int, **how: bool) -> None:
        if takes_whole(f"{name}.{part}.weight", shape):
            found.append(_Matrix(held, **how))

    if inner:
        add(f"{mlp}.down", (h, inner), h * inner // ranks)
        for kind in into:
            add(f"{mlp}.{kind}", (inner, h), h * inner // ranks, is_joined=joins and kind == "up")
    if share is not None:
        number, width = share.experts.num_experts, share.experts.moe_ffn_hidden_size
        add("mlp.experts.down", (number, h, width), share.matrix, of_expert=True)
        for kind in into:
            add(f"mlp.experts.{kind}", (number, width, h), share.matrix, of_expert=True)
        add("mlp.router", (number, h), number * h, is_cut=False)
    *projections, output = attention_matrices(block)
    for part, shape in [("attention.output", output), *(("attention.qkv", one) for one in reversed(projections))]:
        add(part, shape, math.prod(shape) // ranks)
    for shape in short_matrices(block):
        add("attention", shape, math.prod(shape), is_cut=False)
    return found
