"""Every optimizer, rate and growing batch trains on every layout as on one process."""

from __future__ import annotations

from tests.matrix.rows import OPTIMIZERS
from tests.matrix.runner import Row, Runner, items_of


@items_of(OPTIMIZERS)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
