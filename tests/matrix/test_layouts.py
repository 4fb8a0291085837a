"""Every model trains on every layout as one process does: initial weights to the bit; losses, norms and gradients to
fp32 rounding."""

from __future__ import annotations

from tests.matrix.drawn import DRAWN_CONTEXT, DRAWN_EXPERTS
from tests.matrix.programs import Changes
from tests.matrix.rows import rows_of
from tests.matrix.runner import Row, Runner, case_of, items_of

PARTS = ("layouts", "families", "compiled", "bert", "chunks", "context", "experts", "fp8-layouts", "lora")


@items_of([*rows_of(*PARTS), *DRAWN_CONTEXT, *DRAWN_EXPERTS])
def test_row(row: Row, runner: Runner) -> None:
    runner.check(row)


def test_what_rows_vary_has_an_effect(runner: Runner) -> None:
    """Clipping, dropout and the seed."""
    changed: list[Changes] = [{}, {"micro_batch_size": 1, "hidden_dropout": 0.2}, {"seed": 7}]
    plain, dropped, seeded = runner.outcomes([case_of(Row("", "gpt2", changes, []), "") for changes in changed])
    assert min(plain.norms) > 0.5, "clipping is meant to be active"
    assert plain.losses != dropped.losses
    assert plain.losses[0] != seeded.losses[0]
