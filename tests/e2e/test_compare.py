"""benchmarks/compare.py runs, and torch's own parallelism computes the same losses as megacore on every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import main

pytestmark = pytest.mark.slow
SMALL = ["--hidden", "32", "--seq", "32", "--vocab", "256", "--rounds", "1", "--steps", "1", "--peers", "torch"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_computes_the_same_losses(ranks: int, tmp_path: Path) -> None:
    assert main([*SMALL, "--ranks", str(ranks), "--memory-limit-mib", "0", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    kinds = {row["layout"]["kind"] for row in found["rows"] if row["side"] == "torch"}
    further = {
        2: {"pp-interleaved", "pp-zero-bubble"},
        4: {"tp-dp", "tp-zero1", "tp-zero3", "pp-dp", "pp-zero1", "tp-pp"},
    }
    assert kinds >= {"one", "dp", "zero1", "zero2", "zero3", "tp", "tp-sp", "pp", *further[ranks]}
