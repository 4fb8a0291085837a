"""benchmarks/gauntlet.py: the mistakes of its table can be made, and its ways to look find them. Of other trainers only
what they say themselves counts as found."""

from __future__ import annotations

import pkgutil
from dataclasses import replace

import pytest

from benchmarks.gauntlet import BUGS, TABLE, Bug, bug_of, tried
from benchmarks.gauntlet_peers import Run, verdict
from megacore.verify import faults

TAMPERED = [bug_of(name, row | {"layout": "one", "published": {}}) for name, row in TABLE["tamper"]["bugs"].items()]


@pytest.mark.parametrize("bug", [*BUGS, *TAMPERED], ids=lambda bug: bug.name)
def test_every_mistake_has_its_function(bug: Bug) -> None:
    assert hasattr(faults, bug.defect.fault) and bug.layout in TABLE["layouts"]
    for call in bug.defect.calls or ():
        function = pkgutil.resolve_name(f"megacore.{call}")
        if bug.defect.fault == "changed_line":
            assert faults.changed_line(None, function, **bug.defect.options) is not function


def test_verify_and_the_audit_find_a_mistake_each() -> None:
    bugs = [bug for bug in BUGS if bug.name in ("window-ignored", "lr-one-step-late")]
    found = {result.name: result for bug in bugs for result in tried([bug], all_ways=False)}
    assert found["window-ignored"].found == {"verify": "against those"}
    assert found["lr-one-step-late"].by == "audit" and found["lr-one-step-late"].how.startswith("step 4 ")


def test_of_another_trainer_only_what_it_says_is_found() -> None:
    clean, wrong = (Run(losses, lines=frozenset({"step"})) for losses in ([[2.0, 1.0]] * 2, [[2.0, float("nan")]] * 2))
    for run, word in (
        (clean, "no-change"),
        (wrong, "never"),
        (replace(wrong, losses=[], ended="hang"), "hang"),
        (replace(wrong, losses=[[2.0]], said="ValueError", ended="hang"), "found:ValueError"),
        (replace(wrong, lines=frozenset({"step", "replicas differ"})), "found:replicas differ"),
    ):
        assert verdict(run, [clean, clean]) == word
    assert verdict(wrong, [clean, wrong]) == "unsupported"
