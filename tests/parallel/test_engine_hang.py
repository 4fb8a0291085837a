"""A hang in the engine is reported with the rank that holds the others up, and its processes end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacore.config import ParallelConfig, WatchConfig
from megacore.train.engine import Layer, PipelineEngine
from tests.distributed import RankFailed, run_distributed
from tests.patience import scaled_minutes, until

CALL = 4


class Halts(nn.Module):
    """Stops for good in one call on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == CALL and os.environ["RANK"] == "2":
            time.sleep(3600)
        return self.linear(x)


def train(rank: int, world_size: int, output_dir: str, minutes: float) -> None:
    engine = PipelineEngine(
        [Layer("in", nn.Linear, 4, 4), Layer("halts", Halts)],
        loss=F.mse_loss,
        train_iters=10,
        parallel=ParallelConfig(pp=2, dp=2, device="cpu"),
        output_dir=output_dir,
        watch=WatchConfig(hang_timeout_minutes=minutes),
    )
    time.sleep(1.3 * 60.0 * minutes)  # in its own code a program takes as long as it likes
    while True:
        engine.train_batch(engine.split(torch.ones(4, 4), torch.zeros(4, 4)))


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_engine_is_named_and_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGTERM"):
        run_distributed(train, 4, str(tmp_path), scaled_minutes(0.02))
    until(lambda: any(tmp_path.glob("hang-*.json")), 5, "no report")
    report = json.loads(next(tmp_path.glob("hang-*.json")).read_text())
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["is_certain"]) == ("holds up", [2], True)
    assert [rank["phase"] for rank in report["ranks"]][2] == "FORWARD"
    assert "in forward" in report["ranks"][2]["stack"]
