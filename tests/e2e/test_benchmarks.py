"""benchmarks/compare.py and benchmarks/many_ranks.py run: torch's own parallelism computes the same losses as megacore
on every layout, and a job of 96 ranks trains as one process does."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import main
from benchmarks.many_ranks import TOLERANCE, Job, parse, run_job, tiny_model
from tests.e2e.launching import ROOT, run_warm

SMALL = ["--hidden", "32", "--seq", "32", "--vocab", "256", "--rounds", "1", "--steps", "1", "--peers", "torch"]


@pytest.mark.slow
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


# ---- make gpu-check


needs_pretend = pytest.mark.skipif(
    importlib.util.find_spec("tests.accelerator.device") is None or shutil.which("g++") is None,
    reason="the pretend accelerator needs g++: apt install g++",
)
# State that lies on the device where the optimizer is offloaded.
ON_DEVICE = {"params", "grads"}
SHAPES = ("gpt2-small", "gpt2-xl", "llama-3.2-1b")
TRAINED = {"training", "synchronisations", "profile"}
# What each part records, by name.
KINDS = {
    "machine": {"machine", "rates"},
    "tests": {"test"},
    "layouts": {"layout"},
    "kernels": {"kernel"},
    "train gpt2-xl, offload": TRAINED,
    "train experts": {"fit", *TRAINED},
    "checkpoint": {"checkpoint"},
    **{f"train {shape}": {"fit", *TRAINED} for shape in SHAPES},
    **{f"train {shape}, compiled": TRAINED for shape in SHAPES},
}


def check(output: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the command; exit status, what it said, and its report."""
    script = ROOT / "benchmarks" / "gpu.py"
    done = run_warm(script, "--small", "--output", output, *arguments, timeout=1800, directory=ROOT)
    path = output / "gpu-report.json"
    return done.returncode, done.stdout + done.stderr, json.loads(path.read_text()) if path.exists() else {}


def test_some_parts_on_the_cpu(tmp_path: Path) -> None:
    status, said, report = check(tmp_path, "--device", "cpu", "--only", "kernels")
    assert status == 0, said
    assert [(part["name"], part["status"]) for part in report["parts"]] == [("machine", "done"), ("kernels", "done")]
    assert report["small"] and len(report["source"]["sha256"]) == 64
    assert (tmp_path / "gpu-report.md").read_text() in said
    assert "|swiglu 16 x 64 |forward |" in said


def check_records(report: dict[str, Any]) -> None:
    """The figures of all parts are there and fit together."""
    for record in (record for part in report["parts"] for record in part["records"]):
        if record["kind"] == "training":
            counted, predicted = record["state_bytes_counted"], record["state_bytes_predicted"]
            assert all(counted[kind] == pytest.approx(predicted[kind], rel=0.01) for kind in predicted)
            on_device = sum(counted[kind] for kind in counted if record["mode"] != "offload" or kind in ON_DEVICE)
            assert record["peak_bytes"] > on_device
            assert record["peak_bytes_predicted"] > on_device
        elif record["kind"] == "kernel":
            assert record["error"] is None and record["seconds"] > 0
        elif record["kind"] == "synchronisations":
            assert record["per_step"] >= 1


@pytest.mark.slow
@needs_pretend
def test_every_part_on_the_pretend_accelerator(tmp_path: Path) -> None:
    status, said, report = check(tmp_path, "--device", "pretend")
    assert status == 0, said + (tmp_path / "gpu-report.log").read_text()
    found = {part["name"]: {record["kind"] for record in part["records"]} for part in report["parts"]}
    assert found == KINDS
    check_records(report)
