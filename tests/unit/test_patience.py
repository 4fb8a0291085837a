"""Timeouts grow with the slowness of the machine and with its load, and never fall below what is stated."""

from __future__ import annotations

import pytest

from tests import patience as module
from tests.patience import MARGIN, Machine, patience, scaled, scaled_minutes, until


@pytest.mark.parametrize(
    ("slowness", "load_before", "load_now", "expected"),
    [
        (0.5, 0.2, 0.9, 10.0),  # a fast, quiet machine
        (3.0, 0.2, 0.9, 30.0),  # a slow one
        (1.0, 0.2, 4.0, 40.0),  # it became busy: four processes per core
        (4.0, 4.0, 4.0, 40.0),  # it was as busy when it was measured
        (2.0, 2.0, 4.0, 40.0),
        (4.0, 4.0, 80.0, 60.0),  # what hangs made it busy: the limit
        (4.0, 4.0, 0.1, 40.0),
    ],
)
def test_timeouts_scale_with_speed_and_load(
    monkeypatch: pytest.MonkeyPatch, slowness: float, load_before: float, load_now: float, expected: float
) -> None:
    monkeypatch.setattr(module, "measured", lambda: Machine(slowness=slowness, load=load_before))
    monkeypatch.setattr(module, "_load", lambda: load_now)
    assert scaled(10.0) == expected
    assert patience(10.0) == MARGIN * expected
    assert scaled_minutes(10.0 / 60.0) == pytest.approx(expected / 60.0, abs=1e-6)


def test_the_machine_is_measured_once() -> None:
    assert module.measured() is module.measured()
    assert module.measured().slowness > 0


def test_waiting_ends_with_the_condition_or_with_the_message() -> None:
    answers = iter((False, False, True))
    until(lambda: next(answers), 60, "never")
    with pytest.raises(AssertionError, match="what was seen"):
        until(lambda: False, 0, lambda: "what was seen")
