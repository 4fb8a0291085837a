"""What changes not a bit: layouts and schedules under --reproducible, recomputation, and a resume on another layout."""

from __future__ import annotations

import torch

from tests.matrix.drawn import DRAWN_EXACT
from tests.matrix.rows import rows_of
from tests.matrix.runner import Row, Runner, case_of, items_of

PARTS = ("exact", "exact-context", "schedules", "savers", "moments", "resumes", "fp8-exact", "lora-exact")


@items_of([*rows_of(*PARTS), *DRAWN_EXACT])
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)


def test_another_number_of_blocks_is_another_rounding(runner: Runner) -> None:
    (row,) = (row for row in rows_of("exact") if row.id == "exact-blocks")
    one, two = runner.outcomes([case_of(row, words) for words in ("blocks1", "blocks2")])
    assert any(not torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)
