"""What no processor decides is as it was written down: exit status, words and settings of every command line, and what
tools print and write. After a change that means to change them: `python -m tests.golden.make`, and read the diff."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import make
from tests.golden.trees import HERE, ROOT, differences, on_workers

SHARDS = 8


@pytest.mark.parametrize("shard", range(SHARDS))
def test_command_lines_are_answered_as_before(shard: int) -> None:
    lines = [json.loads(line) for line in (HERE / "argv.jsonl").read_text().splitlines()]
    expected = {json.dumps(line.pop("given")): line for line in lines[shard::SHARDS]}
    work = make.argv()
    found = on_workers(ROOT, {key: work[key] for key in [*map(make.plain_line, make.SCRIPTS), *expected]}, 1)
    assert list(differences(expected, {key: make.portable(found)[key] for key in expected})) == []


@pytest.mark.slow
def test_tools_print_and_write_what_they_did() -> None:
    expected: dict[str, Any] = json.loads((HERE / "tools.json").read_text())
    assert list(differences(expected, make.portable(make.collect(ROOT, "tools", 2)["tools"]))) == []
