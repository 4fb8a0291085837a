"""Stages by cost and by hand."""

from __future__ import annotations

import itertools
import re

import pytest

from megacore.config.pipeline_layout import parse_layout
from megacore.models.spec import LayerSpec
from megacore.pipeline.partition import partition


def layer(cost: int, *, is_block: bool) -> LayerSpec:
    build = lambda: None  # noqa: E731
    return LayerSpec(name="x", build=build, parameters=cost, flops=cost * cost, is_block=is_block)  # type: ignore[arg-type]


def test_bloom_stages() -> None:
    """70 blocks on 12 stages with a 250,880-word table at both ends: 5, ten times 6, 5."""
    h, table = 14336, 250_880 * 14336
    layers = [
        layer(table, is_block=False),
        *(layer(12 * h * h, is_block=True) for _ in range(70)),
        layer(table, is_block=False),
    ]
    blocks = [sum(layers[i].is_block for i in stage) for stage in partition(layers, 12)]
    assert blocks == [5, *[6] * 10, 5]


@pytest.mark.parametrize("balance", ["parameters", "flops", "uniform"])
def test_partition_is_the_best_of_all(balance: str) -> None:
    for sizes in ([5, 1, 1, 1, 1, 5], [9, 3, 3, 3, 3, 3, 2], [1, 2, 2, 2, 2, 2, 2, 8]):
        layers = [layer(c, is_block=0 < i < len(sizes) - 1) for i, c in enumerate(sizes)]
        cost = {"parameters": sizes, "flops": [c * c for c in sizes], "uniform": [1] * len(sizes)}[balance]
        for stages in range(1, len(sizes) - 1):
            found = partition(layers, stages, balance)
            assert [i for stage in found for i in stage] == list(range(len(sizes)))
            assert max(sum(cost[i] for i in stage) for stage in found) == best_largest_cost(layers, cost, stages)
            assert all(any(layers[i].is_block for i in stage) for stage in found)


def best_largest_cost(layers: list[LayerSpec], cost: list[int], stages: int) -> int:
    best = 10**9
    for cuts in itertools.combinations(range(1, len(layers)), stages - 1):
        parts = [range(a, b) for a, b in itertools.pairwise([0, *cuts, len(layers)])]
        if all(any(layers[i].is_block for i in part) for part in parts):
            best = min(best, max(sum(cost[i] for i in part) for part in parts))
    return best


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="3 stages are more than the model's 2 blocks: use 2 or less"):
        partition([layer(1, is_block=False), *[layer(1, is_block=True)] * 2], 3)


def test_a_layout_by_hand() -> None:
    assert parse_layout("E,2*t|t|3*t,H", stages=3, blocks=6) == [range(3), range(3, 4), range(4, 8)]
    assert parse_layout(" E | 2*t , t | H", stages=3, blocks=3) == [range(1), range(1, 4), range(4, 5)]


@pytest.mark.parametrize(
    "text, said",
    [
        ("E,2*t|t,H", "it has 2 stages, but --pp x --virtual-stages is 3: write 3 stages"),
        ("E,2*t|t|t", "the layers are not in order: write one E, then every t, then one H"),
        ("E,t|H|t,t", "the layers are not in order: write one E, then every t, then one H"),
        ("E,t|t|x,H", "stage 2: 'x' is not E, t or H"),
        ("E,t||t,H", "stage 1: '' is not E, t or H"),
        ("E,t|0*t|t,H", "stage 1 holds no layer"),
        ("E,t|t|t,H", "it has 3 blocks, but --num-layers is 4: use --num-layers 3, or write 4 blocks"),
        ("E,t|t|9999999999*t,H", "stage 2: 9999999999*t is more than --num-layers 4: use a smaller number"),
        ("E,t|" + "9" * 5000 + "*t|t,H", "' is not E, t or H"),
        ("E,\u0662*t|t|t,H", "stage 0: '\u0662*t' is not E, t or H"),
    ],
)
def test_a_wrong_layout_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_layout(text, stages=3, blocks=4)
