"""ZeRO stages 0 to 3 change no number: torch.optim.AdamW's own run in one process is the measure. Every optimizer
trains on every layout as on one process, and what is sent in fewer bits follows the run that sends all."""

from __future__ import annotations

from tests.matrix.rows import rows_of
from tests.matrix.runner import Row, Runner, items_of


@items_of(rows_of("zero", "optimizers", "compressed"))
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)
