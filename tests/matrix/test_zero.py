"""ZeRO stages 0 to 3 change no number: torch.optim.AdamW's own run in one process is the measure."""

from __future__ import annotations

from tests.matrix.rows import ZERO
from tests.matrix.runner import Row, Runner, items_of


@items_of(ZERO)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
