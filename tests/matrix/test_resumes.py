"""A run that is resumed on another layout begins with the bits that were saved, and goes on with the same losses."""

from __future__ import annotations

from tests.matrix.rows import RESUMES
from tests.matrix.runner import Row, Runner, items_of


@items_of(RESUMES)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
