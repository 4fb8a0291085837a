"""The JSON of a plan and of a search: every number has a unit and an origin, and what is predicted has a range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.planning import BLOOM, numbers_without_unit, planned

EXPERTS = (
    "pretrain_gpt.py --preset mixtral-8x7b --num-layers 4 --global-batch-size 16 --cluster h100 --world-size 8 "
    "--tokens 1e9"
)
SPLIT = (
    "pretrain_gpt.py --preset llama-3-8b --cluster h100 --tp 2 --pp 4 --dp 8 --zero-stage 1 --global-batch-size 64 "
    "--schedule zero-bubble"
)


def figures_apart(report: Any, about: dict[str, Any]) -> Iterator[str]:
    """Keys whose number is not that of the figure beside it, or whose figure has another unit or no range."""
    if isinstance(report, list):
        for value in report:
            yield from figures_apart(value, about)
    elif isinstance(report, dict) and "value" not in report:
        for key, value in report.items():
            if key == "numbers":
                continue
            yield from figures_apart(value, about)
            if "figure" not in about.get(key, {}):
                continue
            beside = report[about[key]["figure"]]
            pairs = [(value, beside)] if isinstance(value, float) else [(value[name], beside[name]) for name in value]
            for number, figure in pairs:
                has_range = key.endswith("capacity_bytes") or figure["low"] <= number <= figure["high"]
                if figure["value"] != number or figure["unit"] != about[key]["unit"] or not has_range:
                    yield key


@pytest.mark.parametrize(
    "flags",
    [
        f"{BLOOM} --tokens 366e9",
        f"{EXPERTS} --tp 2 --sequence-parallel --dp 4 --ep 4 --etp 1",
        f"{EXPERTS} --search --top 3 --recompute full --recompute-num-layers 1",
        "pretrain_gpt.py --preset gpt2-small --cluster a100-40g --offload-optimizer --dp 2 --zero-stage 1",
        "pretrain_gpt.py --preset gpt2-small --cluster laptop --world-size 2 --search --max-tp 1",
    ],
)
def test_every_number_has_a_unit_an_origin_and_if_it_is_predicted_a_range(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = planned(capsys, flags)
    assert list(numbers_without_unit(report, report["numbers"])) == []
    assert list(figures_apart(report, report["numbers"])) == []


@pytest.mark.parametrize("flags", [BLOOM, SPLIT])
def test_the_ranges_of_the_terms_add_up_to_that_of_the_peak(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, flags)
    for rank in report["memory"]:
        for end in ("low", "value", "high"):
            assert sum(term[end] for term in rank["terms"].values()) == pytest.approx(rank["peak"][end])
    for end in ("low", "value", "high"):
        assert report["peak"][end] == max(rank["peak"][end] for rank in report["memory"])
