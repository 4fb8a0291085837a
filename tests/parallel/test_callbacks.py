"""Callbacks: what they are told and when, a sink in ten lines, an early stop, and what happens where one fails.
Trackers: what each writes is read back by its own reader, a resumed run continues it, and none can hold a run up."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from megacore.checkpoint.directory import published, step_of
from megacore.checkpoint.save import Saved
from megacore.config import LoggingConfig
from megacore.observe.events import Events
from megacore.observe.sinks import finish
from megacore.observe.trackers.background import MOST_WAITING, Background
from megacore.observe.trackers.tensorboard import TensorBoard
from megacore.observe.trackers.tracker import RunInfo
from megacore.observe.trackers.wandb_run import ID_FILE, WandbRun
from megacore.parallel.heartbeat import Phase
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train import metrics, trainer
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.engine import Layer, PipelineEngine
from megacore.train.step import StepResult
from tests.distributed import run_distributed
from tests.parity.runs import BATCH, SEQUENCE, make_config, make_trainer
from tests.patience import patience


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
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: takes.now))
    run(tmp_path, takes, collect, log_interval=1)
    assert collect.columns["perf/step_time_s"] == [1.0] * 4


def records_on_clocks(rank: int, world_size: int, directory: str) -> dict[str, list[Any]]:
    """A run in which every rank measures another time per step."""
    takes, collect = Takes(seconds=1.0 + rank), Collect()
    config = make_config((1, 2, 1), directory, train_iters=2, log_interval=1, num_layers=2)
    with patch.object(metrics, "time", SimpleNamespace(perf_counter=lambda: takes.now)):
        make_trainer(config, build_mesh(config.parallel), callbacks=[takes, collect]).run()
    return collect.columns


def test_a_record_is_that_of_the_slowest_rank_on_every_rank(tmp_path: Path) -> None:
    first, second = run_distributed(records_on_clocks, 2, str(tmp_path))
    assert first == second
    assert first["perf/step_time_s"] == [2.0, 2.0]
    assert first["perf/tokens_per_sec"] == [BATCH * SEQUENCE / 2.0] * 2
    assert [json.loads(line)["perf/step_time_s"] for line in (tmp_path / "metrics.jsonl").open()] == [2.0, 2.0]


def test_a_sink_collects_what_is_logged(tmp_path: Path) -> None:
    """Sinks that close slowly have the budget of the exit, not that of a step."""
    sink, diary = Collect(), Diary()
    with patch.object(trainer, "section", wraps=trainer.section) as entered:
        run(tmp_path, sink, diary)
    entered.assert_called_once_with(Phase.EXIT)
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


# ---- trackers: what each writes is read back by its own reader, a resumed run continues it, none can hold a run up


Record = dict[str, Any]
SHORT: dict[str, Any] = {"train_iters": 4, "log_interval": 1, "eval_interval": 2, "eval_iters": 1, "num_layers": 1}


def train(directory: Path, *callbacks: Callback, **changes: Any) -> list[Record]:
    """Train, and return the records of metrics.jsonl."""
    config = make_config((1, 1, 1), directory, **SHORT | changes)
    make_trainer(config, Mesh(device=torch.device("cpu")), callbacks=callbacks).run()
    return records(directory)


def records(directory: Path) -> list[Record]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def info(directory: Path, first_step: int = 0) -> RunInfo:
    return RunInfo(output_dir=directory, first_step=first_step, config=make_config((1, 1, 1), directory))


# ---- CSV


def rows(directory: Path) -> list[Record]:
    """The rows of metrics.csv as records: without empty cells, and with numbers."""
    with (directory / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    return [{key: json.loads(cell) for key, cell in row.items() if cell} for row in found]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_directory_that_is_lost_during_a_run_is_made_again(
    is_deleted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file that the run writes is there at the end and whole; one warning says what is not."""
    directory, elsewhere, board = tmp_path / "run", tmp_path / "elsewhere", tmp_path / "run" / "board"

    class Losing(Callback):
        def on_save(self, run: Run, saved: Saved) -> None:
            if saved.step == 2:
                directory.rename(elsewhere)
                if is_deleted:
                    shutil.rmtree(elsewhere)

    directory.mkdir()
    (directory / "config.toml").write_text("settings")
    written = train(directory, Losing(), csv=True, tensorboard_dir=str(board), save_interval=2)
    assert [row["step"] for row in written] == [1, 2, 2, 3, 4, 4]
    assert rows(directory) == written
    assert (directory / "config.toml").read_text() == "settings"
    assert [step_of(path) for path in published(directory)] == [4]
    events = [json.loads(line)["event"] for line in (directory / "events.jsonl").read_text().splitlines()]
    assert events == ["launch", "memory", "save", "save", "memory", "end"]
    assert scalars(board)["train/loss"] == [(r["step"], fp32(r["train/loss"])) for r in written if "train/loss" in r]
    what = "was deleted" if is_deleted else f"is {elsewhere}/metrics.jsonl now"
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert warnings == [
        f"warning: {directory}/metrics.jsonl {what}: it is made again, with all that it had, and config.toml; "
        f"checkpoints and other files of {directory} are not there any more"
    ]


def test_what_a_callback_tells_is_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Tells(Callback):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            if result.step == 3:
                run.say("half way")
                run.emit("hot", celsius=[91, math.nan], step=7, where=Path("rack"))
                with pytest.raises(ValueError, match="'log' of events is the trainer's"):
                    run.emit("log", loss=1.0)

    train(tmp_path, Tells())
    assert "\nhalf way\n" in capsys.readouterr().out
    (event,) = [e for line in (tmp_path / "events.jsonl").open() if (e := json.loads(line))["event"] == "hot"]
    assert event == {"event": "hot", "time": event["time"], "step": 3, "celsius": [91, None], "where": "rack"}


# ---- TensorBoard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads. It takes most of a second to load, which ranks would do too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def fp32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    assert isinstance(rounded, float)
    return rounded


def test_tensorboard_shows_the_repeated_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    events = tmp_path / "events"
    for first_step, losses in ((0, {1: 5.0, 2: 4.0, 3: 3.0}), (2, {3: 3.5, 4: 2.5})):
        board = TensorBoard(events)
        board.open(info(tmp_path, first_step))
        for step, loss in losses.items():
            board.write({"step": step, "train/loss": loss})
        board.close(failed=False)
        time.sleep(1.1 if first_step == 0 else 0)  # files are read in the order of their names, which have seconds
    assert scalars(events)["train/loss"] == [(1, 5.0), (2, 4.0), (3, 3.5), (4, 2.5)]


def test_tensorboard_takes_numbers_beyond_fp32(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.open(info(tmp_path))
    board.write({"step": 2**40, "a": 1e300, "b": -1e300, "c": math.nan, "d": None, "e": "words", "f": 7})
    board.close(failed=False)
    found = scalars(tmp_path)
    assert {key: found[key] for key in "abf"} == {
        "a": [(2**40, math.inf)],
        "b": [(2**40, -math.inf)],
        "f": [(2**40, 7.0)],
    }
    assert math.isnan(found["c"][0][1])
    assert found.keys() == set("abcf")


# ---- Weights & Biases


def offline_run(directory: Path) -> list[Any]:
    """The records of the last offline run, whose file W&B's own process completes soon after the run."""
    deadline = time.monotonic() + patience(30)
    while not of_kind(found := list(read_records(directory)), "exit"):
        assert time.monotonic() < deadline, [record.WhichOneof("record_type") for record in found]
        time.sleep(0.05)
    return found


def read_records(directory: Path) -> Iterator[Any]:
    """The complete records of the last offline run: a file of 32 KiB blocks, whose chunks have a header of 7 bytes.

    W&B's process may be writing: reading ends at the first chunk whose checksum its content does not have yet.
    """
    from wandb.proto import wandb_internal_pb2

    path = max(directory.glob("wandb/offline-run-*/*.wandb"))
    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, position)
        chunk = content[position + 7 : position + 7 + length]
        if kind == 0 or zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum:
            break
        parts += chunk
        position += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def of_kind(found: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def logged(history: Any) -> Record:
    """The metrics of a history record, without W&B's own."""
    pairs = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
    return {key: value for key, value in pairs.items() if not key.startswith("_")}


def test_every_tracker_has_every_record_and_a_resumed_run_continues_them(tmp_path: Path) -> None:
    """CSV has the steps that a resumed run does again once; TensorBoard reads every number."""
    settings = {"wandb_project": "a project", "wandb_mode": "offline", "wandb_group": "a group", "csv": True}
    settings["tensorboard_dir"] = str(tmp_path / "board")
    (tmp_path / ID_FILE).write_text("0123abcd\n")  # of an earlier run: a fresh one gets its own
    written = train(tmp_path, **settings, save_interval=2)
    first = offline_run(tmp_path)
    (run,) = of_kind(first, "run")
    kept = (tmp_path / ID_FILE).read_text().strip()
    assert kept != "0123abcd"
    assert (run.project, run.run_group, run.run_id, run.display_name) == ("a project", "a group", kept, tmp_path.name)
    settings_sent = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings_sent["optimizer"]["lr"] == 1e-3
    assert [logged(history) for history in of_kind(first, "history")] == written
    metrics = {metric.name or metric.glob_name: metric.step_metric for metric in of_kind(first, "metric")}
    assert metrics["*"] == "step"
    keys = {key for record in written for key in record} - {"step"}
    numbers = {key: [(r["step"], fp32(r[key])) for r in written if key in r] for key in keys}
    assert scalars(tmp_path / "board") == numbers
    (checkpoint, _) = sorted(published(tmp_path))
    (tmp_path / "board" / ID_FILE).write_text("../../etc\n")  # damaged: it would be a part of paths
    resumed: Any = SimpleNamespace(output_dir=tmp_path / "board", first_step=2, config=LoggingConfig())
    with patch.dict("sys.modules", wandb=Mock()):
        WandbRun(LoggingConfig(wandb_project="a project")).open(resumed)
    assert re.fullmatch("[0-9a-f]{8}\n", (tmp_path / "board" / ID_FILE).read_text())
    written = train(tmp_path, **settings, load=str(checkpoint))
    assert rows(tmp_path) == written
    assert [row["step"] for row in written] == [1, 2, 2, 3, 4, 4]
    second = offline_run(tmp_path)
    assert of_kind(second, "run")[0].run_id == kept
    assert [logged(history) for history in of_kind(second, "history")] == [r for r in written if r["step"] > 2]


# ---- the engine


def test_the_engine_logs_and_profiles(tmp_path: Path) -> None:
    engine = PipelineEngine(
        [Layer("one", nn.Linear, 4, 4), Layer("two", nn.Linear, 4, 2)],
        loss=nn.functional.mse_loss,
        train_iters=3,
        logging=LoggingConfig(csv=True, profile_steps="2:2"),
        output_dir=tmp_path,
        mesh=Mesh(device=torch.device("cpu")),
    )
    written = []
    for _ in range(3):
        loss = engine.train_batch(engine.split(torch.ones(4, 4), torch.zeros(4, 2)))
        written.append({"step": engine.step, "train/loss": float(loss), "train/lr": engine.lr})
        engine.log({key: value for key, value in written[-1].items() if key != "step"})
    engine.close()
    assert rows(tmp_path) == written
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["rank_0.json.gz"]


# ---- trackers that fail or hang


class Broken:
    """A tracker that fails in one of its methods, or hangs until it is let go."""

    flag = "--broken"

    def __init__(self, where: str, *, hangs: bool = False) -> None:
        self.where, self.let_go, self.taken = where, threading.Event() if hangs else None, 0

    def open(self, run: RunInfo) -> None:
        self._pass("open")

    def write(self, record: Mapping[str, Any]) -> None:
        self._pass("write")
        self.taken += 1

    def rewind(self, step: int) -> None:
        self._pass("rewind")

    def close(self, *, failed: bool) -> None:
        self._pass("close")

    def _pass(self, where: str) -> None:
        if where == self.where and self.let_go is not None:
            self.let_go.wait()
        elif where == self.where:
            raise SystemExit("no network,\nand no key")


@pytest.mark.parametrize("where", ["open", "close"])
def test_a_tracker_that_fails_is_reported_once_and_training_is_the_same(tmp_path: Path, where: str) -> None:
    said: list[str] = []
    with_it = train(
        tmp_path / "with", Events([Background(Broken(where), info(tmp_path), say=said.append)]), eval_interval=0
    )
    without = train(tmp_path / "without", eval_interval=0)
    assert [r["train/loss"] for r in with_it] == [r["train/loss"] for r in without]
    assert said[0].startswith("--broken ")
    assert "SystemExit: no network, and no key; training continues" in said[0]
    assert said[1:] == ([] if where == "close" else ["--broken lacks 4 records, which metrics.jsonl has"])


@pytest.mark.parametrize("where", ["write", "close"])
def test_a_tracker_that_hangs_holds_nothing_up(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacore.observe.sinks.END_SECONDS", 0.2)
    said: list[str] = []
    hangs = Broken(where, hangs=True)
    tracker = Background(hangs, info(tmp_path), say=said.append)
    for step in range(MOST_WAITING + 10):
        tracker.take(Event(step, "log", {"step": step}))
    finish([tracker])
    assert hangs.let_go is not None
    hangs.let_go.set()
    assert said[-1].startswith("--broken has not finished in time, ")
    assert len(said) <= 2
