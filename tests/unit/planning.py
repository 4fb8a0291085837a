"""A plan as tools/plan.py prints it with --json, and the configuration of a run to plan, for tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from tools.plan import main

BLOOM = (
    "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 --micro-batch-size 2 "
    "--zero-stage 1 --recompute full --schedule 1f1b --pipeline-balance parameters --cluster a100-80g"
)


def planned(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def resolved(flags: str) -> ResolvedConfig:
    return parse_config(flags.split(), prog="pretrain_gpt.py", description="", kind=Config, planned=True)
