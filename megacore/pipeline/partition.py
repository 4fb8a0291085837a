"""Splitting a model's layers into consecutive pipeline stages of balanced cost.

The cost of a layer is its predicted time, its number of parameters (what a stage must hold), its operations, or one.
Embedding and head count: by time the last stage gets fewer blocks where the vocabulary is large, by parameters the
first stage too (BLOOM's 70 blocks on 12 stages come out as 5, ten times 6, 5).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from megacore.config import ResolvedConfig
from megacore.config.pipeline_layout import parse_layout
from megacore.plan.layer_time import TimedLayer, layer_seconds


class LayerCost(TimedLayer, Protocol):
    """What is asked of a layer: a `LayerSpec`, or a `LayerOutline` before torch is loaded."""

    @property
    def is_block(self) -> bool: ...


def layer_costs(layers: Sequence[LayerCost], config: ResolvedConfig) -> list[float]:
    """What `--pipeline-balance` counts of each layer."""
    balance = config.parallel.pipeline_balance
    if balance == "time":
        seconds: dict[tuple[int | str, int], float] = {}  # of each kind of layer: blocks are alike
        keys = [(id(layer.block) if layer.block else layer.name, layer.parameters) for layer in layers]
        for key, layer in zip(keys, layers, strict=True):
            if key not in seconds:
                seconds[key] = layer_seconds(config, layer)
        return [seconds[key] for key in keys]
    return [{"parameters": layer.parameters, "flops": layer.flops, "uniform": 1}[balance] for layer in layers]


def stage_ranges(layers: Sequence[LayerCost], config: ResolvedConfig) -> list[range]:
    """Which layers every stage of the model holds: as laid out by hand, or balanced."""
    parallel = config.parallel
    count = parallel.pp * parallel.virtual_stages
    if parallel.pipeline_layout is not None:
        return parse_layout(parallel.pipeline_layout, stages=count, blocks=sum(layer.is_block for layer in layers))
    return partition(layers, count, layer_costs(layers, config))


def partition(layers: Sequence[LayerCost], stages: int, costs: Sequence[float]) -> list[range]:
    """Consecutive layer ranges, one per stage, with the smallest possible largest cost; every stage holds a block.

    Among equal largest costs the smallest sum of squares wins, so that what remains is even too.

    Args:
        layers: the whole model.
        stages: number of stages, at most the number of blocks.
        costs: of each layer.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks = sum(layer.is_block for layer in layers)
    if stages > blocks:
        raise ValueError(f"{stages} stages are more than the model's {blocks} blocks: use {blocks} or less")
    return list(_partition(tuple(costs), tuple(layer.is_block for layer in layers), stages))


@functools.lru_cache(maxsize=256)  # the planner asks for the same stages with other batches and precisions
def _partition(layer_costs: tuple[float, ...], is_block: tuple[bool, ...], stages: int) -> tuple[range, ...]:
    cost, held = [0, *accumulate(layer_costs)], [0, *accumulate(map(int, is_block))]
    # best[k][j]: (largest cost, sum of squares, start of the last stage) of layers [0, j) on k stages
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0, 0, 0)}]
    for _ in range(stages):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(1, len(layer_costs) + 1):
            for start in range(end - 1, -1, -1):
                part = cost[end] - cost[start]
                if end in row and part > row[end][0]:
                    break  # the stage only grows
                if start in best[-1] and held[end] > held[start]:
                    largest, squares, _ = best[-1][start]
                    option = (max(largest, part), squares + part * part, start)
                    row[end] = min(option, row.get(end, option))
        best.append(row)
    ranges, end = [], len(layer_costs)
    for row in reversed(best[1:]):
        start = row[end][2]
        ranges.append(range(start, end))
        end = start
    return tuple(ranges[::-1])
