"""Cutting a pair of segments to the room that there is."""

from __future__ import annotations

import numpy as np

from megacore.data.bert.layouts import truncated


def test_a_pair_is_cut_from_the_longer_one_at_either_end_by_lot() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        long_a, long_b = rng.integers(1, 40, size=2).tolist()
        room = int(rng.integers(2, 60))
        lengths = [long_a, long_b]
        while sum(lengths) > room:
            lengths[0 if lengths[0] > lengths[1] else 1] -= 1
        a, b = truncated((100, 100 + long_a), (500, 500 + long_b), room, rng)
        assert [a[1] - a[0], b[1] - b[0]] == lengths
        assert 100 <= a[0] <= a[1] <= 100 + long_a
        assert 500 <= b[0] <= b[1] <= 500 + long_b
    fronts = [truncated((0, 30), (50, 60), 20, rng)[0][0] for _ in range(400)]
    assert abs(np.mean(fronts) - 10) < 0.5
    assert len(set(fronts)) > 5
