"""docs/explain/code-tour.md is true: its stops name what their files define."""

from __future__ import annotations

import ast
import re

import pytest

from tests.unit.packaging_builds import ROOT

ANCHOR = re.compile(r"^\d+\. \[`(?P<path>[\w/.]+)`\]\(\.\./\.\./(?P=path)\) `(?P<symbol>[\w.]+)`")
STOPS = [
    match for line in (ROOT / "docs/explain/code-tour.md").read_text().splitlines() if (match := ANCHOR.match(line))
]
FILES = [stop["path"] for stop in STOPS]


def test_the_tour_has_ten_files_at_most() -> None:
    assert 5 < len(STOPS) <= 10
    assert len(set(FILES)) == len(FILES)


@pytest.mark.parametrize("stop", STOPS, ids=FILES)
def test_a_stop_names_what_its_file_defines(stop: re.Match[str]) -> None:
    node: ast.Module | ast.stmt = ast.parse((ROOT / stop["path"]).read_text())
    for name in stop["symbol"].split("."):
        assert isinstance(node, ast.Module | ast.ClassDef)
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
