"""Buckets of the matrices that an optimizer such as Muon takes whole, as data parallelism makes them.

Counted are the matrices of blocks that all tensor-parallel ranks split; those of experts are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.plan.buckets import grown
from megacore.plan.model_size import attention_matrices, short_matrices
from megacore.plan.packing import bucket_ends, pack
from megacore.plan.state import PlannedLayer, held_by_layer


@dataclass(frozen=True, kw_only=True)
class WholeBuckets:
    """The buckets of a pipeline stage.

    Attributes:
        size: elements of each, padding included, the last used first.
        padding: elements of all that belong to no parameter.
        of_layer: by the number of a layer, the numbers of the buckets that hold its matrices; none where it has none.
    """

    size: Sequence[int] = ()
    padding: int = 0
    of_layer: Sequence[range] = ()

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
    (held,) = held_by_layer([chunk])
    least = grown(min(int(config.parallel.bucket_size_mb * 2**20), sum(held)), shard_ranks(config.parallel)) // 4
    sizes: list[int] = []
    joined: set[int] = set()
    first: dict[int, int] = {}  # of each layer, the number of its first matrix
    for number in reversed(range(len(chunk))):
        first[number] = len(sizes)
        if (block := chunk[number].block) is not None:
            sizes += _matrices(config, block, chunk[number].name)
            if block.activation == "swiglu" and not block.mlp_bias and block.experts is None and not on_cpu:
                joined.add(first[number] + 1)  # up, and gate
    ends = bucket_ends(sizes, shards, least=least, joined=joined) if shards > 1 else [len(sizes)]
    packed = [shards * pack(sizes[begin:end], shards).shard_size for begin, end in pairwise([0, *ends])]
    bucket_of = [number for number, (begin, end) in enumerate(pairwise([0, *ends])) for _ in range(begin, end)]
    of_layer = []
    for number in range(len(chunk)):
        last = first[number - 1] if number else len(sizes)
        own = bucket_of[first[number] : last]
        of_layer.append(range(own[0], own[-1] + 1) if own else range(0))
    return WholeBuckets(size=packed, padding=sum(packed) - sum(sizes), of_layer=of_layer)


def _matrices(config: ResolvedConfig, block: ResolvedModel, name: str) -> list[int]:
    """Elements of a block's matrices on one rank that the optimizer takes whole, the last used first."""
    ranks, takes_whole = ranks_of_role("layer", config.parallel), config.optimizer_settings.takes_whole
    inner, h = block.inner_size, block.hidden_size
    if block.experts is not None:
        inner = block.experts.moe_shared_expert_size or 0
    into = ["up", "gate"] if block.gated else ["up"]
    mlp = [("mlp.down", (h, inner)), *((f"mlp.{kind}", (inner, h)) for kind in into)] if inner else []
    *projections, output = attention_matrices(block)
    attention = [("attention.output", output), *(("attention.qkv", shape) for shape in reversed(projections))]
    split = [shape for part, shape in [*mlp, *attention] if takes_whole(f"{name}.{part}.weight", shape)]
    whole = [shape for shape in short_matrices(block) if takes_whole(f"{name}.attention.weight", shape)]
    return [rows * columns // ranks for rows, columns in split] + [rows * columns for rows, columns in whole]
