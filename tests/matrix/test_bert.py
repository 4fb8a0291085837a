"""BERT's numbers are the same on every layout."""

from __future__ import annotations

from tests.matrix.rows import BERT
from tests.matrix.runner import Row, Runner, items_of


@items_of(BERT)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
