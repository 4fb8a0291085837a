"""A head that computes logits and loss a chunk of the vocabulary at a time trains like one that holds all logits."""

from __future__ import annotations

from tests.matrix.rows import CHUNKS
from tests.matrix.runner import Row, Runner, items_of


@items_of(CHUNKS)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
