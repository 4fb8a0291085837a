"""GPT-2 is the same on every layout: initial weights to the bit; losses, norms and gradients to fp32 rounding."""

from __future__ import annotations

from tests.matrix.programs import Changes
from tests.matrix.rows import LAYOUTS
from tests.matrix.runner import Row, Runner, case_of, items_of


@items_of(LAYOUTS)
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)


def test_what_rows_vary_has_an_effect(runner: Runner) -> None:
    """Clipping, dropout and the seed."""
    changed: list[Changes] = [{}, {"micro_batch_size": 1, "hidden_dropout": 0.2}, {"seed": 7}]
    plain, dropped, seeded = runner.outcomes([case_of(Row("", "gpt2", changes, []), "tp2") for changes in changed])
    assert min(plain.norms) > 0.5, "clipping is meant to be active"
    assert plain.losses != dropped.losses
    assert plain.losses[0] != seeded.losses[0]
