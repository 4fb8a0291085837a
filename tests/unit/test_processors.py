"""A rank's share of its node's cores, however the launcher lets ranks use them."""

from __future__ import annotations

import pytest

from megacore.parallel.processors import share_of_cores


@pytest.mark.parametrize(
    ("masks", "shares"),
    [
        ([range(8)], [8]),
        ([range(8), range(8)], [4, 4]),
        ([range(8), range(8, 16)], [8, 8]),
        ([range(6), range(4, 10)], [5, 5]),
        ([range(8)] * 3, [2, 2, 2]),
        ([range(1)] * 4, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_a_core_counts_for_those_that_may_use_it(masks: list[range], shares: list[int]) -> None:
    node = [frozenset(mask) for mask in masks]
    assert [share_of_cores(own, node) for own in node] == shares
