"""Context parallelism, and samples of several documents, train as one process does."""

from __future__ import annotations

from tests.matrix.drawn import DRAWN_CONTEXT
from tests.matrix.rows import CONTEXT
from tests.matrix.runner import Row, Runner, items_of


@items_of([*CONTEXT, *DRAWN_CONTEXT])
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
