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
from megacore.pipeline.partition import layer_kind, stage_ranges
from megacore.plan.state import PlannedLayer, held_blocks, held_by_layer, held_experts, held_parameters, shared_table


@dataclass(frozen=True, kw_only=True, eq=False)
class OnRank:
    """The layers of one pipeline rank.

    Attributes:
        stages: the numbers of the layers of each of its stages.
        chunks: these layers.
        parameters: that it holds, as `held_parameters` has them.
        experts: how many of them are of experts.
        blocks: how many of them are of blocks.
        is_last: whether the last stage is among its stages.
    """

    stages: Sequence[range]
    chunks: Sequence[Sequence[PlannedLayer]]
    parameters: int
    experts: int
    blocks: int
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
    def table(self) -> int:
        """Parameters of a table that two layers of a stage share."""
        return shared_table(self.chunks)


class Cut:
    """A model in stages.

    Args:
        config: a resolved configuration; of it only the degrees count.
        layers: the whole model.
        stages: the numbers of the layers of each stage; None: as the configuration has them.
    """

    def __init__(
        self, config: ResolvedConfig, layers: Sequence[PlannedLayer], stages: Sequence[range] | None = None
    ) -> None:
        self.layers = layers
        self.stages = stage_ranges(layers, config) if stages is None else stages
        self.ranks = ranks_of_role("pipeline", config.parallel)
        self._on_rank: dict[int, OnRank] = {}
        self._distinct: dict[bool, list[int]] = {}

    def on_rank(self, config: ResolvedConfig, rank: int) -> OnRank:
        """What one pipeline rank holds; of the configuration only the degrees count."""
        if rank not in self._on_rank:
            stages = self.stages[rank :: self.ranks]
            self._on_rank[rank] = OnRank(
                stages=stages,
                chunks=[self.layers[numbers.start : numbers.stop] for numbers in stages],
                parameters=held_parameters(self.layers, stages),
                experts=held_experts(config, self.layers, stages),
                blocks=held_blocks(self.layers, stages),
                is_last=self.stages[-1] in stages,
            )
        return self._on_rank[rank]

    def distinct_ranks(self, *, last: bool) -> list[int]:
        """The first, or the last, of the pipeline ranks whose layers are alike."""
        if last not in self._distinct:
            kinds, found = [layer_kind(layer) for layer in self.layers], dict[Hashable, int]()
            for rank in range(self.ranks) if last else reversed(range(self.ranks)):
                on_rank = self.stages[rank :: self.ranks]
                found[tuple(tuple(kinds[numbers.start : numbers.stop]) for numbers in on_rank)] = rank
            self._distinct[last] = list(found.values())
        return self._distinct[last]
