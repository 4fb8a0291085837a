"""Splitting a model's layers into consecutive pipeline stages of balanced cost.

The cost of a layer is its number of parameters (what a stage must hold), its operations (what it must compute), or one.
Embedding and head count, so that the first and last stages get fewer blocks where the vocabulary is large (BLOOM's 70
blocks on 12 stages come out as 5, ten times 6, 5).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from megacore.config import ParallelConfig
from megacore.config.pipeline_layout import parse_layout


class LayerCost(Protocol):
    """What is asked of a layer: a `LayerSpec`, or a `LayerOutline` before torch is loaded."""

    @property
    def parameters(self) -> int: ...
    @property
    def flops(self) -> float: ...
    @property
    def is_block(self) -> bool: ...


def costs(layers: Sequence[LayerCost], balance: str) -> list[float]:
    """The cost of each layer.

    Args:
        layers: the whole model.
        balance: `parameters`, `flops`, or `uniform`.
    """
    return [{"parameters": layer.parameters, "flops": layer.flops, "uniform": 1}[balance] for layer in layers]


def stage_ranges(layers: Sequence[LayerCost], config: ParallelConfig) -> list[range]:
    """Which layers every stage of the model holds: as laid out by hand, or balanced."""
    count = config.pp * config.virtual_stages
    if config.pipeline_layout is not None:
        return parse_layout(config.pipeline_layout, stages=count, blocks=sum(layer.is_block for layer in layers))
    return partition(layers, count, config.pipeline_balance)


def partition(layers: Sequence[LayerCost], stages: int, balance: str = "parameters") -> list[range]:
    """Consecutive layer ranges, one per stage, with the smallest possible largest cost; every stage holds a block.

    Among equal largest costs the smallest sum of squares wins, so that what remains is even too.

    Args:
        layers: the whole model.
        stages: number of stages, at most the number of blocks.
        balance: what a layer costs, as for `costs`.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks = sum(layer.is_block for layer in layers)
    if stages > blocks:
        raise ValueError(f"{stages} stages are more than the model's {blocks} blocks: use {blocks} or less")
    return list(_partition(tuple(costs(layers, balance)), tuple(layer.is_block for layer in layers), stages))


@functools.lru_cache(maxsize=256)  # the planner asks for the same stages with other batches and precisions
def _partition(layer_costs: tuple[float, ...], is_block: tuple[bool, ...], stages: int) -> tuple[range, ...]:
    cost, held = [0, *accumulate(layer_costs)], [0, *accumulate(map(int, is_block))]
    # best[k][j]: (largest cost, sum of squares, start of the last stage) of layers [0, j) on k stages
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0, 0, 0)}]
    for _ in range(stages):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(1, len(layer_costs) + 1):
            options = [
                (max(largest, part := cost[end] - cost[start]), squares + part * part, start)
                for start, (largest, squares, _) in best[-1].items()
                if start < end and held[end] > held[start]
            ]
            if options:
                row[end] = min(options)
        best.append(row)
    ranges, end = [], len(layer_costs)
    for row in reversed(best[1:]):
        start = row[end][2]
        ranges.append(range(start, end))
        end = start
    return tuple(ranges[::-1])
