"""Moments in 16 and 8 bits have the same bits on every layout, and after a resume."""

from __future__ import annotations

from tests.matrix.rows import MOMENTS
from tests.matrix.runner import Row, Runner, items_of


@items_of(MOMENTS)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
