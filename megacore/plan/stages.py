"""A model that is cut into the stages of a pipeline, and what each pipeline rank holds of it.

None of this depends on the batch, on recomputation or on the stage of ZeRO. A search asks for it again and again, so it
is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.models.outline import ModelLayer
from megacore.pipeline.partition import layer_kind, stage_ranges
from megacore.pipeline.schedule_file import placement
from megacore.plan.state import held_by_layer, held_experts
from megacore.plan.whole_matrices import weights_taken_whole

Chunk = Sequence[ModelLayer]
"""The layers of one stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStages:
    """The layers of one pipeline rank.

    Attributes:
        chunks: the layers of each of its stages.
        experts: how many of its parameters are of experts.
        is_last: whether the last stage is among its stages.
    """

    chunks: Sequence[Chunk]
    experts: int
    is_last: bool

    @cached_property
    def distinct_blocks(self) -> list[ResolvedModel]:
        """The blocks that are not one and the same."""
        return list({id(one.block): one.block for chunk in self.chunks for one in chunk if one.block}.values())

    @cached_property
    def by_layer(self) -> list[list[int]]:
        """Parameters by layer, as `held_by_layer` has them."""
        return held_by_layer(self.chunks)

    @cached_property
    def parameters(self) -> int:
        """Parameters that it holds."""
        return sum(map(sum, self.by_layer))


class DistinctStages:
    """The parts into which a model may be cut: stages with layers that are alike are one and the same, and so are the
    ranks that hold them.

    Args:
        config: a resolved configuration; of it only the degrees and the optimizer count.
        layers: the whole model.
    """

    def __init__(self, config: ResolvedConfig, layers: Sequence[ModelLayer]) -> None:
        self.layers = layers
        first: dict[Hashable, ModelLayer] = {}
        self._alike = [first.setdefault(_kind(config, layer), layer) for layer in layers]
        self._chunks: dict[Hashable, Chunk] = {}
        self._ranks: dict[Hashable, RankStages] = {}

    def chunk(self, numbers: range) -> Chunk:
        """The layers of a stage; for each the first that is like it."""
        chunk = self._alike[numbers.start : numbers.stop]
        return self._chunks.setdefault(tuple(map(id, chunk)), chunk)

    def on_rank(self, config: ResolvedConfig, chunks: Sequence[Chunk], *, is_last: bool) -> RankStages:
        """What a pipeline rank with these stages holds."""
        key = (is_last, *map(id, chunks))
        if key not in self._ranks:
            experts = sum(held_experts(config, chunk) for chunk in chunks)
            self._ranks[key] = RankStages(chunks=chunks, experts=experts, is_last=is_last)
        return self._ranks[key]


def _kind(config: ResolvedConfig, layer: ModelLayer) -> Hashable:
    return layer_kind(layer), weights_taken_whole(config, layer)


class StagedModel:
    """A model in stages.

    Args:
        config: a resolved configuration; of it only the degrees and the optimizer count.
        layers: the whole model, or its parts, if other cuts have them in common.
        stages: the numbers of the layers of each stage; None: as the configuration has them.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        layers: Sequence[ModelLayer] | DistinctStages,
        stages: Sequence[range] | None = None,
    ) -> None:
        self._distinct_stages = layers if isinstance(layers, DistinctStages) else DistinctStages(config, layers)
        self.layers = self._distinct_stages.layers
        self.ranks = ranks_of_role("pipeline", config.parallel)
        self.placement = placement(config.parallel)
        ranges = stage_ranges(self.layers, config) if stages is None else stages
        self.chunks = [self._distinct_stages.chunk(numbers) for numbers in ranges]
        self._on_rank: dict[int, RankStages] = {}
        self._distinct: dict[bool, list[int]] = {}

    def on_rank(self, config: ResolvedConfig, rank: int) -> RankStages:
        """What one pipeline rank holds; of the configuration only the degrees count."""
        if rank not in self._on_rank:
            is_last = rank == self.placement.rank_of(len(self.chunks) - 1)
            self._on_rank[rank] = self._distinct_stages.on_rank(config, self._chunks_of(rank), is_last=is_last)
        return self._on_rank[rank]

    def _chunks_of(self, rank: int) -> list[Chunk]:
        return [self.chunks[stage] for stage in self.placement.stages_of(rank)]

    @cached_property
    def unlike_ranks(self) -> list[int]:
        """Pipeline ranks without those whose stages are those of an earlier one."""
        first: dict[Hashable, int] = {}
        for rank in range(self.ranks):
            first.setdefault(self._identity(rank), rank)
        return list(first.values())

    def distinct_ranks(self, *, last: bool) -> list[int]:
        """Pipeline ranks without those that hold no more than an earlier one, or than a later one.

        Args:
            last: leave out ranks that hold no more than a later one.
        """
        if last not in self._distinct:
            found: list[int] = []
            seen = set[Hashable]()
            for rank in reversed(range(self.ranks)) if last else range(self.ranks):
                alike = self._identity(rank)
                if alike not in seen and not any(self._is_in(rank, other) for other in found):
                    found.append(rank)
                seen.add(alike)
            self._distinct[last] = found
        return self._distinct[last]

    def _identity(self, rank: int) -> Hashable:
        return tuple(map(id, self._chunks_of(rank)))

    def _is_in(self, rank: int, other: int) -> bool:
        """Whether each stage of a rank has the last layers of that of another one, or all of them."""
        pairs = zip(self._chunks_of(rank), self._chunks_of(other), strict=True)
        return all(one is larger or larger[-len(one) :] == one for one, larger in pairs)
