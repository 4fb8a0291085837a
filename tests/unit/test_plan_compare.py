"""tools/plan.py --compare: layouts of one run side by side, and what the planner knows of its errors."""

from __future__ import annotations

import json

import pytest

from megacore.plan.checked import PUBLISHED
from tests.unit.planning import planned
from tools.plan import main

RUN = "pretrain_gpt.py --preset llama-3-8b --global-batch-size 64 --cluster h100 --estimate"


def compared(flags: str, *layouts: str) -> int:
    return main([*RUN.split(), *flags.split(), "--compare", *layouts])


def test_the_figures_are_those_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared("--world-size 8 --json --tokens 1e9", "--tp 8", "--tp 2 --zero-stage 1") == 0
    both = json.loads(capsys.readouterr().out)
    alone = [
        planned(capsys, f"{RUN} --tokens 1e9 {layout}") for layout in ("--tp 2 --dp 4 --zero-stage 1", "--tp 8 --dp 1")
    ]
    assert [layout.pop("given") for layout in both["layouts"]] == ["--tp 2 --zero-stage 1", "--tp 8"]
    assert both["layouts"] == alone
    fast, slow = (plan["step_seconds"]["value"] for plan in alone)
    (line,) = both["verdicts"]
    assert line.startswith(f"(--tp 2 --zero-stage 1) wins: it saves {1 - fast / slow:.1%} of the time of (--tp 8)")
    assert "less exposed tensor, sequence and context parallel communication" in line and "the ranges" in line


def test_the_range_has_the_errors_of_published_steps(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, f"{RUN.replace('h100', 'a100-80g')} --software megatron-lm --tp 8 --dp 4")
    seconds, errors = plan["step_seconds"], PUBLISHED["a100", "megatron-lm", "dense models"]
    assert seconds["high"] >= errors.high * seconds["value"] * (1 - 1e-9)
    assert seconds["low"] <= errors.low * seconds["value"] * (1 + 1e-9)
    rate = plan["throughput"]["tokens/s"]
    assert rate["low"] == pytest.approx(rate["value"] * seconds["value"] / seconds["high"])


def test_a_search_marks_what_is_tight(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two limits between which the upper end of the best layout's peak lies."""
    flags = f"{RUN} --world-size 16 --dp 16 --zero-stage 3 --recompute none --micro-batch-size 1 --search"
    peak = planned(capsys, flags)["layouts"][0]["peak"]
    for limit, is_tight in ((peak["high"] * 1.01, False), (peak["high"] * 0.99, True)):
        (row,) = planned(capsys, f"{flags} --max-memory-gb {limit / 1e9}")["layouts"]
        assert row["tight"] == is_tight


def test_a_search_offloads_where_nothing_fits_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, f"{RUN} --world-size 1 --search")["layouts"]
    assert found and all(row["flags"].endswith(" --offload-optimizer") for row in found)
    alone = planned(capsys, f"{RUN} {found[0]['flags']}")
    assert alone["fits"] and alone["step_seconds"]["value"] == pytest.approx(found[0]["step_seconds"]["value"])
