"""Stages by cost and by hand."""

from __future__ import annotations

import itertools
import re
from random import Random

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
    end, block = layer(table, is_block=False), layer(12 * h * h, is_block=True)
    layers = [end, *[block] * 70, end]
    stages = partition(layers, 12, [layer.parameters for layer in layers])
    blocks = [sum(layers[i].is_block for i in stage) for stage in stages]
    assert blocks == [5, *[6] * 10, 5]


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


# ---- by time


def test_partition_has_the_smallest_sum_of_squares_that_stages_in_order_give() -> None:
    """As the table of all ends and starts gives it, which the partition does not fill where no best one can lie."""
    random = Random(1)
    for _ in range(150):
        blocks = random.randint(1, 9)
        size = random.choice([1.0, 1.3, 1e9])
        inner = [random.choice([size, size, random.random()]) for _ in range(blocks)]
        edges = random.choice([(0.01, 3.0), (0.0, 0.0), (4.0, 0.2)])
        cost = [edges[0], *inner, edges[1]]
        layers = [layer(1, is_block=0 < i <= blocks) for i in range(len(cost))]
        stages = random.randint(1, blocks)
        assert partition(layers, stages, cost) == whole_table(cost, stages)


def whole_table(cost: list[float], stages: int) -> list[range]:
    """Stages of blocks between an embedding and a head."""
    sums = [0, *itertools.accumulate(cost)]
    best: dict[int, tuple[float, float, list[range]]] = {0: (0.0, 0.0, [])}
    for _ in range(stages):
        row = {}
        for end in range(2, len(cost) + 1):
            parts = [(start, sums[end] - sums[start]) for start in best if max(start, 1) < min(end, len(cost) - 1)]
            options = [
                (max(best[start][0], part), best[start][1] + part * part, [*best[start][2], range(start, end)])
                for start, part in parts
            ]
            if options:
                row[end] = min(options, key=lambda option: (*option[:2], option[2][-1].start))
        best = row
    return best[len(cost)][2]
