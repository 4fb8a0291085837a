"""Callbacks: what they are told and when, a sink in ten lines, an early stop, and what happens where one fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megacore.checkpoint.save import Saved
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train import clock
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult
from tests.distributed import run_distributed
from tests.parity.runs import BATCH, SEQUENCE, make_config, make_trainer


class Collect(Callback):
    """A sink: the metrics of every logged step, by key."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            self.columns.setdefault(key, []).append(value)


class Diary(Callback):
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_begin(self, run: Run, step: int) -> None:
        assert run.step == step - 1
        self.calls.append(f"begin {step}")

    def on_step_end(self, run: Run, result: StepResult) -> None:
        assert run.step == result.step
        self.calls.append(f"end {result.step}")

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        self.calls.append(f"log {record['step']}")

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        assert record["eval/loss"] > 0
        self.calls.append(f"evaluate {record['step']}")

    def on_save(self, run: Run, saved: Saved) -> None:
        self.calls.append(f"save {saved.step} {saved.path.is_dir()}")

    def on_stop(self, run: Run, reason: str | None) -> None:
        self.calls.append(f"stop {reason}")

    def on_error(self, run: Run, error: BaseException) -> None:
        self.calls.append(f"error {error}")


class Fails(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step == 2:
            raise RuntimeError("a sink broke")

    def on_error(self, run: Run, error: BaseException) -> None:
        raise OSError("and cannot say so")


class Takes(Callback):
    """Lets time pass on a clock of its own: a second for each step, and more for what is no part of one."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.now, self._seconds = 0.0, seconds

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.now += self._seconds

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        self.now += 100.0
        with run.unclocked():
            self.now += 30.0

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        self.now += 1000.0


OPTIONS: dict[str, Any] = {"train_iters": 4, "log_interval": 2, "eval_interval": 3, "eval_iters": 1, "save_interval": 2}


def run(directory: Path, *callbacks: Callback, **changes: Any) -> None:
    config = make_config((1, 1, 1), directory, **OPTIONS | changes)
    make_trainer(config, Mesh(device=torch.device("cpu")), callbacks=callbacks).run()


def test_time_of_logs_and_evaluations_is_no_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes, collect = Takes(), Collect()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: takes.now))
    run(tmp_path, takes, collect, log_interval=1)
    assert collect.columns["perf/step_time_s"] == [1.0] * 4


def records_on_clocks(rank: int, world_size: int, directory: str) -> dict[str, list[Any]]:
    """A run in which every rank measures another time per step."""
    takes, collect = Takes(seconds=1.0 + rank), Collect()
    config = make_config((1, 2, 1), directory, train_iters=2, log_interval=1, num_layers=2)
    with patch.object(clock, "time", SimpleNamespace(perf_counter=lambda: takes.now)):
        make_trainer(config, build_mesh(config.parallel), callbacks=[takes, collect]).run()
    return collect.columns


def test_a_record_is_that_of_the_slowest_rank_on_every_rank(tmp_path: Path) -> None:
    first, second = run_distributed(records_on_clocks, 2, str(tmp_path))
    assert first == second
    assert first["perf/step_time_s"] == [2.0, 2.0]
    assert first["perf/tokens_per_sec"] == [BATCH * SEQUENCE / 2.0] * 2
    assert [json.loads(line)["perf/step_time_s"] for line in (tmp_path / "metrics.jsonl").open()] == [2.0, 2.0]


def test_a_sink_collects_what_is_logged(tmp_path: Path) -> None:
    sink, diary = Collect(), Diary()
    run(tmp_path, sink, diary)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "train/loss" in record]
    assert sink.columns["step"] == [2, 4]
    assert sink.columns["train/loss"] == [record["train/loss"] for record in logged]
    assert {key: [record[key] for record in logged] for key in sink.columns} == sink.columns
    assert diary.calls == [
        *("begin 1", "end 1", "begin 2", "end 2", "log 2", "save 2 True"),
        *("begin 3", "end 3", "evaluate 3", "begin 4", "end 4", "log 4", "evaluate 4", "save 4 True"),
        "stop None",
    ]


def test_a_callback_that_fails_ends_the_run_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diary = Diary()
    with pytest.raises(RuntimeError, match="a sink broke"):
        run(tmp_path, Fails(), diary)
    assert diary.calls == ["begin 1", "end 1", "begin 2", "error a sink broke"]
    assert "Fails.on_error failed" in capsys.readouterr().err
