"""`python benchmarks/gpu.py` from end to end, at small sizes, where there is no GPU: on the CPU a part of it, on the
tests' pretend accelerator all of it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import ROOT, run_warm

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
