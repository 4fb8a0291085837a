"""Every layout trains mixtures of experts as one process does."""

from __future__ import annotations

from tests.matrix.drawn import DRAWN_EXPERTS
from tests.matrix.rows import EXPERTS
from tests.matrix.runner import Row, Runner, items_of


@items_of([*EXPERTS, *DRAWN_EXPERTS])
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
