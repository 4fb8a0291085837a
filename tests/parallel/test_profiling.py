"""--profile-steps: each rank's trace has the steps that were asked for, and what is asked for wrongly is refused."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path

import pytest

from megacore.config import validate
from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer


def run(rank: int, world_size: int, output_dir: str, profile_steps: str | None) -> None:
    config = make_config((1, 1, 2), output_dir, train_iters=4, num_layers=1, profile_steps=profile_steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*Profiler")
        make_trainer(config, build_mesh(config.parallel)).run()


def losses(directory: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_every_rank_writes_a_trace_of_the_steps(tmp_path: Path) -> None:
    run_distributed(run, 2, str(tmp_path / "profiled"), "2:3")
    run_distributed(run, 2, str(tmp_path / "plain"), None)
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")
    files = sorted((tmp_path / "profiled" / "profile").iterdir())
    assert [file.name for file in files] == ["rank_0.json.gz", "rank_1.json.gz"]
    for file in files:
        names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        assert names.count("aten::embedding") == 2 * 2  # in each of 2 steps, for each of the rank's 2 microbatches
        assert "gloo:all_reduce" in names


@pytest.mark.parametrize("text", ["5", "0:3", "4:3", "a:b", "1:2:3", "-1:2", "1.5:2", "\u0661:\u0662"])
def test_a_range_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (problem,) = validate(make_config((1, 1, 1), tmp_path, profile_steps=text), 1)
    assert problem.startswith(f"--profile-steps {text} must be A:B, two step numbers with 1 <= A <= B")


def test_a_range_beyond_the_run_is_refused(tmp_path: Path) -> None:
    message = (
        "--profile-steps 15:30 must end within --train-iters 20: use --profile-steps 15:20, or a larger --train-iters"
    )
    assert validate(make_config((1, 1, 1), tmp_path, profile_steps="15:30"), 1) == [message]
    far, only = f"15:3{'0' * 90}", message.removesuffix(", or a larger --train-iters")  # no run is that long
    assert validate(make_config((1, 1, 1), tmp_path, profile_steps=far), 1) == [only.replace("15:30", far)]
    assert validate(make_config((1, 1, 1), tmp_path, profile_steps="20:20"), 1) == []
