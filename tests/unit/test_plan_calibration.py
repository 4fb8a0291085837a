"""tools/plan.py --calibrate: efficiencies fitted to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config, save_toml
from tests.parity.runs import make_config
from tests.unit.planning import planned
from tools.plan import main


def test_calibration_predicts_the_run_that_it_is_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config((1, 1, 1), tmp_path)
    save_toml(config, tmp_path / "config.toml")
    records = [{"step": step, "perf/step_time_s": seconds} for step, seconds in enumerate((9.0, 0.5, 0.5, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert main(["--calibrate", str(tmp_path)]) == 0
    capsys.readouterr()
    cluster = tmp_path / "cluster.toml"
    plan = planned(capsys, f"pretrain_gpt.py --config {tmp_path / 'config.toml'} --cluster {cluster}")
    assert plan["step_seconds"]["value"] == pytest.approx(0.5, rel=1e-3)
    assert plan["step_seconds"]["origin"] == "fitted"


def test_calibration_takes_runs_of_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--mock-data --vocab-size 64 --train-iters 4 --num-layers 2 --hidden-size 32 --num-attention-heads 2"
    config = parse_config(flags.split(), prog="pretrain_bert.py", description="", kind=BertConfig)
    save_toml(config, tmp_path / "config.toml")
    (tmp_path / "metrics.jsonl").write_text('{"perf/step_time_s": 0.5}', encoding="utf-8")
    assert main(["pretrain_bert.py", "--calibrate", str(tmp_path)]) == 0
    assert "predicted with it: 0.5 s (+0.0%)" in capsys.readouterr().out
