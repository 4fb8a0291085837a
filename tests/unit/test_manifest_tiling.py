"""The pieces of a tensor cover it exactly, in any number of dimensions, or the manifest is refused."""

from __future__ import annotations

import numpy as np
import pytest

from megacore.checkpoint.manifest import Piece, TensorEntry, is_tiled, schema_of

Box = tuple[list[int], list[int]]  # start, stop


def entry(shape: list[int], boxes: list[Box]) -> TensorEntry:
    return TensorEntry(
        shape=shape, dtype="float32", pieces=[Piece(file="f", start=start, stop=stop) for start, stop in boxes]
    )


PINWHEEL: list[Box] = [([0, 0], [2, 1]), ([2, 0], [3, 2]), ([1, 2], [3, 3]), ([0, 1], [1, 3]), ([1, 1], [2, 2])]


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ([], [([], [])], True),
        ([], [([], []), ([], [])], False),
        ([0, 3], [([0, 0], [0, 3])], True),
        ([4], [([0], [4])], True),
        ([4], [([0], [4]), ([0], [4])], False),
        ([4], [([0], [4]), ([4], [4])], False),
        ([4], [([0], [5])], False),
        ([3, 3], PINWHEEL, True),
        ([3, 3], PINWHEEL[:4], False),
        ([3, 3], [*PINWHEEL, PINWHEEL[4]], False),
        ([2, 2], [([0, 0], [2, 1]), ([0, 0], [2, 1])], False),  # as many elements as the tensor
        ([2, 2], [([0, 0], [1, 2]), ([1, 0], [2, 1])], False),
        ([2] * 20, [([0] * 20, [1] * 20)] * 4, False),
        ([4, 4], [], False),
    ],
)
def test_by_hand(shape: list[int], boxes: list[Box], expected: bool) -> None:
    assert is_tiled(entry(shape, boxes)) == expected


def test_as_a_count_of_every_element_says() -> None:
    random, seen = np.random.default_rng(1), set()
    for _ in range(3000):
        shape = [int(n) for n in random.integers(1, 4, random.integers(1, 4))]
        boxes = halves(random, [0] * len(shape), shape, int(random.integers(0, 3)))
        if random.random() < 0.5:  # a piece is lost, doubled or moved
            change, number = random.integers(3), int(random.integers(len(boxes)))
            if change == 0:
                del boxes[number]
            elif change == 1:
                boxes.append(boxes[number])
            else:
                start, stop = boxes[number]
                boxes[number] = ([max(0, a - 1) for a in start], stop)
        counts = np.zeros(shape, dtype=int)
        for start, stop in boxes:
            counts[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
        expected = bool((counts == 1).all())
        assert is_tiled(entry(shape, boxes)) == expected, (shape, boxes)
        seen.add((len(shape), expected))
    assert seen == {(d, tiled) for d in (1, 2, 3) for tiled in (True, False)}


def halves(random: np.random.Generator, start: list[int], stop: list[int], depth: int) -> list[Box]:
    """A box, or what random cuts make of it."""
    wide = [d for d, (a, b) in enumerate(zip(start, stop, strict=True)) if b - a > 1]
    if depth == 0 or not wide:
        return [(start, stop)]
    dimension = int(random.choice(wide))
    cut = int(random.integers(start[dimension] + 1, stop[dimension]))
    left = [*stop[:dimension], cut, *stop[dimension + 1 :]]
    right = [*start[:dimension], cut, *start[dimension + 1 :]]
    return halves(random, start, left, depth - 1) + halves(random, right, stop, depth - 1)


def test_only_a_tensor_cut_in_several_dimensions_needs_the_newer_schema() -> None:
    rows = entry([4, 4], [([0, 0], [2, 4]), ([2, 0], [4, 4])])
    blocks = entry([2, 2], [([a, b], [a + 1, b + 1]) for a in range(2) for b in range(2)])
    assert schema_of({"model": {"rows": rows}}) == 2
    assert schema_of({"model": {"rows": rows}, "exp_avg": {"blocks": blocks}}) == 3
