"""A plan as tools/plan.py prints it with --json, and the configuration of a run to plan, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from tools.plan import main

ORIGINS = {"exact", "formula", "fitted", "assumed"}
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


def numbers_without_unit(report: Any, about: dict[str, Any], keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Where a number is that is neither in a figure nor under a key that the report describes."""
    if isinstance(report, dict):
        if "value" in report:
            is_whole = report.keys() == {"value", "unit", "origin", "low", "high"}
            if not (is_whole and isinstance(report["unit"], str) and report["origin"] in ORIGINS):
                yield ".".join(keys)
            return
        for key, value in report.items():
            if key != "numbers":
                yield from numbers_without_unit(value, about, (*keys, key))
    elif isinstance(report, list):
        for value in report:
            yield from numbers_without_unit(value, about, keys)
    elif isinstance(report, int | float) and not isinstance(report, bool):
        known = [about[key] for key in keys if key in about]
        if not known or not known[-1]["unit"] or known[-1]["origin"] not in ORIGINS:
            yield ".".join(keys)
