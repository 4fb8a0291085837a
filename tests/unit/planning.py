"""A plan as tools/plan.py prints it with --json, and the configuration of a run to plan, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from tools.plan import main

ORIGINS = {"exact", "traced", "formula", "fitted", "assumed"}
NOT_PREDICTED = {"goodput", "tokens", "wall_seconds"}
BLOOM = (
    "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 --micro-batch-size 2 "
    "--zero-stage 1 --recompute full --schedule 1f1b --pipeline-balance parameters --cluster a100-80g"
)


def planned(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def with_flags(given: Sequence[str], changed: Sequence[str]) -> list[str]:
    """A command line with other flags in place of its own ones of the same name."""
    kept = list(given)
    for flag in (word for word in changed if word.startswith("--")):
        for name in (flag, flag.replace("--no-", "--")):
            if name in kept:
                at = kept.index(name)
                del kept[at : at + (1 if kept[at + 1 : at + 2] == [] or kept[at + 1].startswith("--") else 2)]
    return [*kept, *changed]


def resolved(flags: str, kind: type[Config] = Config) -> ResolvedConfig:
    return parse_config(flags.split(), prog="pretrain_gpt.py", description="", kind=kind, planned=True)


def wrong_figures(report: Any, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Where a predicted number is that is no figure with a unit, an origin and a range around it."""
    if isinstance(report, dict) and "value" in report:
        low, high = (report["value"] if report[end] is None else report[end] for end in ("low", "high"))
        has_origin = isinstance(report["unit"], str) and report["origin"] in ORIGINS
        if not (len(report) == 5 and has_origin and low <= report["value"] <= high):
            yield ".".join(keys)
    elif isinstance(report, dict):
        for key, value in report.items():
            yield from wrong_figures(value, (*keys, key))
    elif isinstance(report, list):
        for value in report:
            yield from wrong_figures(value, keys)
    elif isinstance(report, float) and keys[-1] not in NOT_PREDICTED:
        yield ".".join(keys)
