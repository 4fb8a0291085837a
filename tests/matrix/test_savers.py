"""Recomputation changes no bit, dropout included."""

from __future__ import annotations

from tests.matrix.rows import SAVERS
from tests.matrix.runner import Row, Runner, items_of


@items_of(SAVERS)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
