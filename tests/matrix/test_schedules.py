"""Every schedule computes the same: bit for bit under --reproducible."""

from __future__ import annotations

from tests.matrix.rows import SCHEDULES
from tests.matrix.runner import Row, Runner, items_of


@items_of(SCHEDULES)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
