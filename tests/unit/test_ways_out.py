"""How ways out are written."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.patience import patience
from tests.unit.planning import planned


def test_the_largest_microbatch_that_fits_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --global-batch-size 64 --cluster laptop --micro-batch-size"
    plan = planned(capsys, f"{run} 64")
    assert plan["ways_out"][0].startswith("--micro-batch-size 4 --global-batch-size 64: ")
    assert planned(capsys, f"{run} 4")["fits"] and not planned(capsys, f"{run} 8")["fits"]
    second, third = plan["ways_out"][1:]
    assert second.startswith("--recompute selective --micro-batch-size 16 ")
    assert "machines" in third and "--micro-batch-size" not in third  # not the same on more machines


def test_a_deep_model_has_its_ways_out_soon(capsys: pytest.CaptureFixture[str]) -> None:
    run = "pretrain_gpt.py --num-layers 3000 --hidden-size 16384 --num-attention-heads 128 --vocab-size 128256"
    started = time.process_time()
    ways = planned(capsys, f"{run} --cluster laptop")["ways_out"]
    assert time.process_time() - started < patience(2)
    assert ways[-1].startswith("--num-layers 1 ") and len(ways) >= 2


@pytest.mark.parametrize("memory", [42.0, 41.0])
def test_a_way_out_whose_range_does_not_fit_is_tight(
    memory: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The range of a planned peak ends 10 % above what is expected."""
    cluster = tmp_path / "device.toml"
    cluster.write_text(f"based_on = 'a100-40g'\nmemory_gb = {memory}\n")
    run = f"pretrain_gpt.py --preset llama-3-8b --micro-batch-size 8 --cluster {cluster}"
    ways = planned(capsys, run)["ways_out"]
    usable = 0.97 * memory * 1e9 / 2**30
    for way in ways:
        size = float(re.search(r": ([\d.]+) GiB", way)[1])  # type: ignore[index]
        assert ("(tight: up to " in way) == (1.1 * size > usable), way
    assert any("tight" in way for way in ways) or memory < 42
