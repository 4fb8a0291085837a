"""benchmarks/compare.py and benchmarks/many_ranks.py run: torch's own parallelism computes the same losses as megacore
on every layout, and a job of 96 ranks trains as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import main
from benchmarks.many_ranks import TOLERANCE, Job, parse, run_job, tiny_model

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


# ---- a job of 96 ranks trains as one process does, and its launch costs a rank about what it costs in a small job


@pytest.mark.slow
def test_96_ranks_train_like_one() -> None:
    options = parse(["--tp", "2", "--pp", "2", "--dp", "2", "--tp", "4", "--pp", "12", "--dp", "2", "--steps", "2"])
    flags = tiny_model(options.layouts, options)
    one, few, many = (run_job(degrees, flags, timeout=300) for degrees in ((1, 1, 1), *options.layouts))
    assert len(one.losses) == 2
    for job in (few, many):
        assert job.losses == pytest.approx(one.losses, rel=TOLERANCE)
    assert len(many.ranks) == 96
    assert store_bytes(many) < 1.5 * store_bytes(few)  # 2.6 KB: not proportional to the ranks
    assert max(rank.groups for rank in many.ranks) == 4  # all ranks, tp, pp and dp
    assert max(rank.sockets for rank in many.ranks) < 40  # not a connection with every other rank


def store_bytes(job: Job) -> float:
    """Of a rank, on average; the first serves more."""
    return sum(rank.store_bytes for rank in job.ranks) / len(job.ranks)
