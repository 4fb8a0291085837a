"""What is sent in fewer bits: training follows the run that sends all, on every layout and after a resume."""

from __future__ import annotations

from tests.matrix.rows import COMPRESSED
from tests.matrix.runner import Row, Runner, items_of


@items_of(COMPRESSED)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
