"""A plan as tools/plan.py prints it with --json, for tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.plan import main

BLOOM = (
    "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 --micro-batch-size 2 "
    "--zero-stage 1 --recompute full --schedule 1f1b --pipeline-balance parameters --cluster a100-80g"
)


def planned(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
