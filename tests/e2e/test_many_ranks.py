"""A job of 96 ranks trains as one process does, and its launch costs a rank about what it costs in a small job."""

from __future__ import annotations

import pytest

from benchmarks.many_ranks import TOLERANCE, Job, parse, run_job, tiny_model


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
