"""tools/plan.py: what it prints of a layout, and the ways out of one that does not fit."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.plan.memory import GIB
from tests.patience import patience
from tests.unit.planning import BLOOM, planned, with_flags

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_run_of_bert_is_planned_with_attention_to_all_positions(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--cluster a100-80g --vocab-size 30522 --seq-length 512 --tp 2 --dp 4 --global-batch-size 64"
    bert = planned(capsys, f"pretrain_bert.py {flags} --micro-batch-size 8")
    assert bert["parameters"]["value"] == 110_106_428  # of transformers' BertForPreTraining, bert-base-uncased
    assert not any("causal" in name for name in bert["throughput"])
    gpt = planned(
        capsys,
        f"pretrain_gpt.py {flags} --micro-batch-size 8 --num-layers 12 --hidden-size 768 --num-attention-heads 12",
    )
    assert bert["step_parts"]["attention"]["value"] > 1.8 * gpt["step_parts"]["attention"]["value"]


LONG = "llama-3-8b-128k --seq-length 65536 --zero-stage 3 --recompute full --micro-batch-size 1 --global-batch-size 8"


DOES_NOT_FIT = {
    "gpt2-xl --pp 4 --schedule gpipe --micro-batch-size 8 --global-batch-size 128 --cluster a100-40g": (
        "--schedule 1f1b"
    ),
    f"{LONG} --dp 8 --cluster a100-40g": "--tp 2 --dp 4 --global-batch-size 8",
    "bloom-176b --cluster laptop --micro-batch-size 1": ("--preset qwen3-0.6b --seq-length 2048, a smaller model"),
    "llama-3-8b --cluster laptop": (
        "--recompute full --tp 8 --pp 2, on 16 machines with as much memory (gpus_per_node = 1)"
    ),
    "mixtral-8x7b --tp 4 --dp 2 --global-batch-size 8 --cluster h100": (
        "--dp 4 --zero-stage 3 --global-batch-size 8, on 16 devices"
    ),
}


@pytest.mark.parametrize(("flags", "known"), DOES_NOT_FIT.items())
def test_the_ways_out_fit_when_they_are_planned(
    flags: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each as flags in place of those that do not fit, with the memory that it names; more machines as a cluster file,
    as the report says."""
    given = f"pretrain_gpt.py --preset {flags}"
    plan = planned(capsys, given)
    assert not plan["fits"]
    assert len(plan["ways_out"]) == 3
    assert any(way.startswith(f"{known}: ") for way in plan["ways_out"]), plan["ways_out"]
    for way in plan["ways_out"]:
        if "machines with at least" in way:
            continue
        words = with_flags(given.split(), re.split(", |: ", way)[0].split())
        if "machines with as much memory" in way:
            of_machine = re.search(r"\((gpus_per_node = \d+)\)", way)
            assert of_machine is not None
            cluster = tmp_path / "machines.toml"
            cluster.write_text(f'based_on = "{plan["cluster"]}"\n{of_machine[1]}', encoding="utf-8")
            words = with_flags(words, ["--cluster", str(cluster)])
        again = planned(capsys, " ".join(words))
        assert again["fits"], way
        peak = again["peak_bytes"] / GIB
        assert f": {peak:,.1f} GiB" in way, (peak, way)


def test_a_plan_loads_only_what_it_needs() -> None:
    """What takes longer to load than a plan takes."""
    idle = {"torch", "numpy", "tokenizers", "rich", "multiprocessing.connection", "http.client"}
    words = [*BLOOM.split(), "--estimate"]
    code = f"import sys, tools.plan as t; t.main({words!r}); sys.exit(bool({idle!r} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


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
