"""Splitting a model's layers into consecutive pipeline stages of balanced cost. The cost of a layer is its predicted
time, its number of parameters (what a stage must hold), its operations, or one. Embedding and head count: by time the
last stage gets fewer blocks where the vocabulary is large, by parameters the first stage too (BLOOM's 70 blocks on 12
stages come out as 5, ten times 6, 5)."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megacore.config import ResolvedConfig
from megacore.config.pipeline_layout import parse_layout
from megacore.models.outline import ModelLayer
from megacore.pipeline.layer_time import layer_seconds


def layer_kind(layer: ModelLayer) -> tuple[int | str, int]:
    """Equal for layers that compute and hold the same, as most blocks do; the caller keeps the layers alive."""
    return id(layer.block) if layer.block is not None else layer.name, layer.parameters


def layer_costs(layers: Sequence[ModelLayer], config: ResolvedConfig) -> list[float]:
    """What `--pipeline-balance` counts of each layer."""
    balance = config.parallel.pipeline_balance
    if balance == "time":
        seconds: dict[tuple[int | str, int], float] = {}
        keys = [layer_kind(layer) for layer in layers]
        for key, layer in zip(keys, layers, strict=True):
            if key not in seconds:
                seconds[key] = layer_seconds(config, layer)
        return [seconds[key] for key in keys]
    return [{"parameters": layer.parameters, "flops": layer.flops, "uniform": 1}[balance] for layer in layers]


def stage_ranges(layers: Sequence[ModelLayer], config: ResolvedConfig) -> list[range]:
    """Which layers every stage of the model holds: as laid out by hand, or balanced."""
    parallel = config.parallel
    count = parallel.pp * parallel.virtual_stages
    beside = sum(layer.with_head for layer in layers)  # the head, and those blocks, are one layer here
    placed = [*layers[: len(layers) - 1 - beside], layers[-1]]
    if parallel.pipeline_layout is not None:
        ranges = parse_layout(parallel.pipeline_layout, stages=count, blocks=sum(layer.is_block for layer in placed))
    else:
        costs = layer_costs(layers, config)
        ranges = partition(placed, count, [*costs[: len(placed) - 1], sum(costs[len(placed) - 1 :])])
    return [*ranges[:-1], range(ranges[-1].start, len(layers))]


def partition(layers: Sequence[ModelLayer], stages: int, costs: Sequence[float]) -> list[range]:
    """Consecutive layer ranges, one per stage, with the smallest possible largest cost; every stage holds a block.
    Among equal largest costs the smallest sum of squares wins, so that what remains is even too. `layers`: the whole
    model. `stages`: at most the number of blocks. Raises ValueError where there are more."""
    blocks = sum(layer.is_block for layer in layers)
    if stages > blocks:
        raise ValueError(f"{stages} stages are more than the model's {blocks} blocks: use {blocks} or less")
    return list(_partition(tuple(costs), tuple(layer.is_block for layer in layers), stages))


@functools.lru_cache(maxsize=256)  # the planner asks for the same stages with other batches and precisions
def _partition(layer_costs: tuple[float, ...], is_block: tuple[bool, ...], stages: int) -> tuple[range, ...]:
    cost, held = [0, *accumulate(layer_costs)], [0, *accumulate(map(int, is_block))]
    most = _some_largest_cost(cost, is_block, stages)
    # best[k][j]: (largest cost, sum of squares, start of the last stage) of layers [0, j) on k stages
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0, 0, 0)}]
    for after in reversed(range(stages)):
        row: dict[int, tuple[float, float, int]] = {}
        # The stages after this one need a block each, and hold no more than all of them may; and so did those before.
        share = most * (1 + 1e-9)
        least = max(bisect_left(held, stages - after), bisect_left(cost, cost[-1] - after * share))
        past = min(bisect_right(held, held[-1] - after), bisect_right(cost, (stages - after) * share))
        for end in range(least, past):
            for start in range(end - 1, -1, -1):
                part = cost[end] - cost[start]
                if part > most or (end in row and part > row[end][0]):
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


def _some_largest_cost(cost: Sequence[float], is_block: Sequence[bool], stages: int) -> float:
    """The largest cost of a stage in some partition, close to the smallest: what costs more is in no best partition.
    Stages are filled one after the other up to a limit, and the limit is bisected. Where fewer stages than asked for
    suffice, more of them cost no more each. `cost`: of the layers before each layer, and of all."""
    blocks = [i for i, block in enumerate(is_block) if block]
    cuts = [0, *blocks[1:], len(is_block)]  # so that each stage between two of them holds a block

    def largest(limit: float) -> float:
        """Of stages up to a limit; infinite where there are too many."""
        first, found, count = 0, 0.0, 1
        for last, after in pairwise(cuts):
            if cost[after] - cost[first] > limit and last > first:
                first, count = last, count + 1
            found = max(found, cost[after] - cost[first])
        return found if count <= stages else math.inf

    low, high = cost[-1] / stages, cost[-1] - cost[0]
    for _ in range(12):
        if (found := largest(middle := (low + high) / 2)) <= high:
            high = found
        else:
            low = middle
    return high
