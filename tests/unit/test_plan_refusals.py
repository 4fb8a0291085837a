"""tools/plan.py: refusals that need more than a command line. The others are rows of tests/tools.toml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacore.commands.dry_run import dry_run
from megacore.config.cli import save_toml
from megacore.plan.cluster import CLUSTERS, to_toml
from tests.parity.runs import make_config
from tests.unit.planning import planned
from tools.plan import main


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc refuses new files to root too")
def test_pictures_that_cannot_be_written_are_refused_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.svg"
    os.mkfifo(pipe)
    flags = f"pretrain_gpt.py --preset gpt2-small --cluster moon --timeline {pipe} --memory-timeline /proc/m.svg"
    assert main(flags.split()) == 2
    out, text = capsys.readouterr()
    assert not out
    for part in (
        "3 problems",
        "--cluster moon",
        f"--timeline {pipe} is not a regular file",
        "--memory-timeline /proc/m.svg cannot be written: /proc takes no new files",
    ):
        assert part in text


def test_calibration_refuses_a_cluster_without_the_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_toml(make_config((1, 1, 1), tmp_path), tmp_path / "config.toml")
    (tmp_path / "metrics.jsonl").write_text('{"perf/step_time_s": 0.5}\n' * 4, encoding="utf-8")
    cluster = tmp_path / "own.toml"
    text = "\n".join(line for line in to_toml(CLUSTERS["h100"]).splitlines() if not line.startswith("fp32 ="))
    cluster.write_text(text, encoding="utf-8")
    assert main(["--calibrate", str(tmp_path), "--cluster", str(cluster)]) == 2
    assert "has no peak for --precision fp32" in capsys.readouterr().err


def test_a_full_dry_run_reports_what_it_cannot_do_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[training]\ncompile = true\n[parallel]\ndevice = "cpu"\n', encoding="utf-8")
    run = f"--preset gpt2-small --mock-data --train-iters 2 --dry-run=full --config {file} --timeline x.svg"
    assert dry_run(run.split(), "pretrain_gpt.py") == 2
    text = capsys.readouterr().err
    for said in (
        "--compile: compiled code does not run on fake tensors",
        "device = cpu: --dry-run=full takes the job for one of h100; add --cluster cpu",
        "--timeline has no effect with --dry-run=full",
    ):
        assert text.count(f"\n  - {said}") == 1, text


def test_flags_have_the_forms_of_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    """Underscores, a value after `=`, and an entry point that follows."""
    plan = planned(capsys, "--preset gpt2-small --cluster h100 --world_size 2 --tokens=1e9 pretrain_gpt.py")
    assert (plan["world_size"], plan["model"]["preset"]) == (2, "gpt2-small")
