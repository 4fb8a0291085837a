"""tools/report.py: a page for every kind of run, whole or not, without any reference, and as a browser shows it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.directory import published
from megacore.checkpoint.lock import WriterLock
from megacore.config.toml import save_toml
from megacore.observe.report.files import read_run
from megacore.observe.report.page import verdict_of
from megacore.parallel.host_memory import host_capacity
from megacore.parallel.mesh import Mesh
from megacore.parallel.processors import available_cores
from megacore.plan.measured_run import read_launch
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult
from tests.parity.runs import make_config, make_trainer
from tools.report import main

SHORT: dict[str, Any] = {"train_iters": 4, "log_interval": 1, "eval_interval": 2, "eval_iters": 1, "num_layers": 1}


class Page(HTMLParser):
    """A parsed page: its tags in order, its text, and whether every tag is closed by its own end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(directory: Path) -> Page:
    """The page that the tool writes for a directory; it refers to nothing outside itself."""
    output = directory.parent / "page.html"
    assert main([str(directory), "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not re.search(r"https?:|//|@import|src=|href=|url\((?!#hatch)", text.replace("http://www.w3.org", ""))
    assert "script" not in {tag for tag, _ in parsed.tags}
    numbers = [value for _, attributes in parsed.tags for value in attributes.values() if value]
    assert not [value for value in numbers if re.search(r"\bnan\b|\binf\b", value)]
    return parsed


def train(directory: Path, *callbacks: Callback, **changes: Any) -> None:
    config = make_config((1, 1, 1), directory, **SHORT | changes)
    make_trainer(config, Mesh(device=torch.device("cpu")), callbacks=callbacks).run()


class Fails(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step == 3:
            raise RuntimeError("<b>disk & cable</b>")


# ---- real runs


def test_a_resumed_run_that_finishes(tmp_path: Path) -> None:
    train(tmp_path / "run", save_interval=2, trace=True)
    save_toml(make_config((1, 1, 1), tmp_path / "run", **SHORT), tmp_path / "run" / "config.toml")
    checkpoint = sorted(published(tmp_path / "run"))[0]
    train(tmp_path / "run", load=str(checkpoint))
    text = page_of(tmp_path / "run").text
    assert "finished Ended as planned, at step 4 of 4." in re.sub(r"\s+", " ", text)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    timeline = "simulated with each stage's mean times: 1F1B, 1 rank"
    for words in (f"{last['train/loss']:.4f}", "resumed", timeline, "--hidden-size", "python", "0: pp0"):
        assert words in text, words
    launches = read_run(tmp_path / "run").events_of("launch")
    assert [e["event"] for e in launches] == ["launch", "launch"]
    launch = read_launch(tmp_path / "run" / "events.jsonl")
    assert launch.machine is not None and launch.machine.memory_bytes == launches[-1]["memory_bytes"] == host_capacity()
    assert (launch.machine.cores, launch.local_ranks, launch.device) == (available_cores(), 1, "cpu")


def test_a_run_that_fails_says_why_and_its_words_are_escaped(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        train(tmp_path / "run", Fails())
    parsed = page_of(tmp_path / "run")
    assert "RuntimeError: <b>disk & cable</b>" in parsed.text
    assert verdict_of(read_run(tmp_path / "run")).word == "failed"
    assert "config.toml is not there" in parsed.text


# ---- made-up ones


def write(directory: Path, records: list[dict[str, Any]], events: list[dict[str, Any]] = [], tail: str = "") -> Path:  # noqa: B006
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    (directory / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return directory


def step(number: int, **values: Any) -> dict[str, Any]:
    record = {"step": number, "consumed_tokens": number * 1000, "train/loss": 5.0 / number, "train/grad_norm": 1.0}
    return record | {"train/lr": 1e-3, "perf/tokens_per_sec": 100.0, "perf/step_time_s": 0.1} | values


def test_short_runs(tmp_path: Path) -> None:
    runs = {
        "no steps": [],
        "ended without a word": [step(1)],
        "nothing was logged": [step(n, **{"train/loss": None}) for n in (1, 2)],
    }
    for number, (said, records) in enumerate(runs.items()):
        assert said in page_of(write(tmp_path / f"run{number}", records)).text


def test_numbers_that_are_none_and_lines_that_are_cut_off(tmp_path: Path) -> None:
    bad = {"train/loss": None, "train/grad_norm": None, "train/lr": "x", "perf/step_time_s": True}
    records = [step(1), step(2, **bad), step(3), {"step": "4"}, {"no": 1}]
    run = write(tmp_path / "run", records, tail='[1]\n{"step": 5, "train/lo')
    parsed = page_of(run)
    assert "metrics.jsonl has 2 lines that are no records" in parsed.text
    assert "step 2: the loss is not finite" in parsed.text
    assert [a["class"] for tag, a in parsed.tags if tag == "path"].count("skip") == 1


def test_a_rollback_is_marked_where_its_samples_were_skipped(tmp_path: Path) -> None:
    """Steps 1 to 30 of 10 samples, back from 30 to 20, samples up to 350 skipped, and on to 40: 550 samples."""

    def at(number: int) -> dict[str, Any]:
        samples = 10 * number + (150 if number > 20 else 0)
        return step(number, consumed_samples=samples, consumed_tokens=samples * 4)

    events: list[dict[str, Any]] = [
        {"event": "launch", "step": 0},
        {"event": "skip", "step": 5, "reason": "stays"},
        {"event": "skip", "step": 25, "reason": "undone"},
        {"event": "skip", "step": 30, "reason": "the spike"},
        {"event": "rollback", "step": 30, "to_step": 20, "reason": "the spike", "skipped_samples": [200, 350]},
        {"event": "launch", "step": 20},
        {"event": "skip", "step": 30, "reason": "of the second time"},
        *({"event": "launch", "step": 30}, {"event": "recovery", "cause": "rank 1 was ended by SIGKILL"}),
    ]
    parsed = page_of(write(tmp_path / "run", [at(number) for number in range(1, 41)], events))
    (first, last), (left, right) = (10, 550), (52.0, 1140 - 14.0)  # samples; pixels of the loss's chart

    def pixel(samples: int) -> float:
        return left + (samples - first) / (last - first) * (right - left)

    bands = [a for tag, a in parsed.tags if tag == "rect" and a.get("class") == "rollback"]
    assert [float(bands[0][key] or 0) for key in ("x", "width")] == pytest.approx(
        [pixel(200), pixel(350) - pixel(200)], abs=0.06
    )
    assert len(bands) == 4  # in the charts of loss, learning rate, gradient norm and throughput
    for kind, samples in (("skip", [50, 450]), ("resume", [350, 450])):
        paths = [a["d"] or "" for tag, a in parsed.tags if tag == "path" and a["class"] == kind]
        assert [float(d[1:].split()[0].split("V")[0]) for d in paths] == pytest.approx(
            list(map(pixel, samples)), abs=0.06
        )
    assert "step 30 rolled back to 20: the spike" in parsed.text and "undone" not in parsed.text
    assert "2 steps skipped 1 failure, 1 resume, 1 rollback" in parsed.text and "rank 1 was ended by" in parsed.text


def test_extreme_numbers_are_named_and_left_out(tmp_path: Path) -> None:
    """Differences of such losses are beyond the largest float."""
    losses = [4.0, 1e308, -1e308, 3.0, 10**400, 2.0]
    records = [step(number, **{"train/loss": loss}) for number, loss in enumerate(losses, start=1)]
    page = page_of(write(tmp_path / "run", [*records, {"step": 10**400, "train/loss": 1.0}], []))
    assert "train/loss has 3 numbers beyond 1e+100, first in step 2: left out of curves and figures." in page.text
    drawn = page_of(write(tmp_path / "drawn", [step(1, **{"train/loss": 1e100}), step(2, **{"train/loss": -1e100})]))
    assert "beyond" not in drawn.text


def test_experts_are_shown_by_layer(tmp_path: Path) -> None:
    def of_step(number: int) -> dict[str, Any]:
        layers = {f"moe/block_{block}/max_violation": 0.25 * block for block in (2, 10)}
        gaps = {"moe/block_2/smallest_gap": None, "moe/block_10/smallest_gap": 3e-5}
        return step(number, **{"moe/mean_violation": 1.5, "moe/max_violation": 2.5}, **layers, **gaps)

    page = page_of(write(tmp_path / "run", [of_step(number) for number in range(1, 4)]))
    after = page.text.partition("Experts by layer")[2]
    assert "step 3" in after and "3e-5" in after and "none" in after
    assert after.index("2.5") > after.index("0.5")  # block 10 comes after block 2
    assert "Experts by layer" not in page_of(write(tmp_path / "dense", [step(1)])).text


def test_markup_in_any_string_of_a_run_is_text(tmp_path: Path) -> None:
    evil = "</title><script>alert(1)</script>\"'&"
    names = ("version", "git", "command", "host", "time", "device", "platform")
    launch: dict[str, Any] = {"event": "launch", "step": 0, **dict.fromkeys(names, evil)}
    launch |= {"degrees": {evil: evil}, "packages": {evil: evil}}
    rank = {"rank": evil, evil: evil, "peak_bytes": 1, "predicted_bytes": None}
    memory = {"event": "memory", "step": 1, "ranks": [rank]}
    skip, spike, end = ({"event": event, "step": 2, "reason": evil} for event in ("skip", "spike", "end"))
    rollback = {"event": "rollback", "step": 2, "to_step": 1, "reason": evil}
    events: list[dict[str, Any]] = [launch, memory, {**launch, "step": 1}, skip, spike, rollback, memory, end]
    events += [{"event": evil}, {"event": "error"}]
    run = write(tmp_path / "a<b>&c", [step(1), step(2)], events)
    (run / "config.toml").write_text(f"[model]\npreset = {json.dumps(evil)}\n[data]\nsplit = {json.dumps(evil)}\n")
    parsed = page_of(run)
    assert parsed.text.count("<script>alert(1)</script>") >= 12
    # A tree without a planner predicts nothing, and nothing is drawn of it.
    assert "expected" not in {attributes.get("class") for _, attributes in parsed.tags}


def test_a_spike_stays_in_a_small_page_of_a_long_run(tmp_path: Path) -> None:
    waves = [{"train/loss": 3.0 + math.sin(n), "train/grad_norm": 1 + math.cos(n)} for n in range(1, 20_001)]
    records = [step(n, **values) for n, values in enumerate(waves, start=1)]
    records[10_864]["train/loss"] = 40.0
    run = write(tmp_path / "run", records)
    page_of(run)
    text = (tmp_path / "page.html").read_text()
    assert len(text.encode()) < 300_000
    raw = next(match[1] for match in re.finditer(r'class="line soft" d="([^"]*)"', text))
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", raw)[1:]]
    peak_x, peak_y = min(points, key=lambda point: point[1])
    assert peak_y < 0.5 * sorted(y for _, y in points)[1]
    assert (peak_x - points[0][0]) / (points[-1][0] - points[0][0]) == pytest.approx(0.5432, abs=1e-3)


def test_a_run_that_is_running(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [step(1)], [{"event": "launch", "step": 0}])
    lock = WriterLock(run)
    command = ["python", "tools/report.py", str(run)]  # a lock of this process does not stop this process everywhere
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "running" in said
    lock.release()
    assert verdict_of(read_run(run)).word == "ended without a word"


def test_pipes_in_place_of_files_do_not_hang(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [step(1)])
    for name in ("events.jsonl", "config.toml", "trace.json", "writer.lock"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert "events.jsonl is not a regular file" in page_of(run).text
