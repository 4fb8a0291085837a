"""tools/plan.py --calibrate: efficiencies fitted to a run; what of its time becomes a speed, and what only widens the
range; whose machine the cluster is."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import load_toml, save_toml
from megacore.errors import ConfigError
from megacore.models.outline import outline
from megacore.parallel.processors import available_cores
from megacore.pipeline.schedule import Action, Timed, build_schedule, requirements, transfers_of
from megacore.pipeline.simulator import Costs, Span, simulate
from megacore.pipeline.trace_file import RankTrace, TracedStep, write_trace
from megacore.plan.calibration import Calibration, calibrate, calibration_text, machine_of
from megacore.plan.cluster import CLUSTERS, load_cluster, to_toml
from megacore.plan.devices import Case
from megacore.plan.measured_run import Machine, read_run
from megacore.plan.step_time import step_time
from megacore.plan.traffic import stage_message
from tests.parity.runs import make_config
from tests.unit.planning import numbers_without_unit, planned
from tools.plan import main


def write_rows(directory: Path, seconds: Sequence[object]) -> None:
    rows = [{"step": step, "perf/step_time_s": value} for step, value in enumerate(seconds)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_run(directory: Path, seconds: Sequence[object] = (9.0, 0.5, 0.5, 0.5)) -> None:
    """What a run of one rank with these step times leaves."""
    save_toml(make_config((1, 1, 1), directory), directory / "config.toml")
    write_rows(directory, seconds)


def refusal_of(directory: Path, *flags: str) -> list[str]:
    """The problems of a fit, without those of anything else; a refusal writes nothing and prints no traceback."""
    with pytest.raises(ConfigError) as refused:
        read_run(directory)
    assert main(["--calibrate", str(directory), *flags]) == 2
    return list(refused.value.problems)


def test_calibration_predicts_the_run_that_it_is_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["--calibrate", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    path = tmp_path / "cluster.toml"
    assert found["path"] == str(path)
    run = f"pretrain_gpt.py --config {tmp_path / 'config.toml'} --cluster {path}"
    step = planned(capsys, run)["step_seconds"]
    assert (step["value"], step["origin"]) == (pytest.approx(0.5, rel=1e-3), "fitted")
    assert found["cluster"] == tomllib.loads(path.read_text(encoding="utf-8"))
    assert (found["rows"], found["rows_left_out"]) == (3, 1)
    assert found["measured_seconds"] == {"fast": 0.5, "median": 0.5, "slow": 0.5}
    assert found["step_seconds"]["value"] == pytest.approx(0.5, rel=1e-3)
    assert found["step_seconds"]["low"] < 0.5 < found["step_seconds"]["high"]
    assert found["device_speed"]["from"] == "metrics.jsonl"
    assert found["link_speed"] is None
    assert found["machine"]["source"].startswith("of this machine")
    assert found["machine"]["cores"] == found["cluster"]["gpus_per_node"] == available_cores()
    assert found["machine"]["memory_bytes"] == pytest.approx(found["cluster"]["memory_gb"] * 1e9)
    about = found["numbers"]
    assert list(numbers_without_unit(found, about)) == []
    assert about["rows"] == {"unit": "rows", "origin": "exact"}
    assert about["peak_tflops"] == {"unit": "TFLOP/s", "origin": "fitted"}
    assert about["node_bandwidth_gb_s"] == {"unit": "GB/s", "origin": "assumed"}  # the run has no transfers


TIMES = ("-1.0", "0", "1e300", "NaN", "Infinity", "-Infinity", "true", "null", '"fast"', "[1]", "1e-9", "9" * 300)
BOUNDS = r", line 3: perf/step_time_s = .{1,40} must be a number of seconds from 1e-06 to 1,000,000"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((f'{{"step": 4, "perf/step_time_s": {text}}}'.encode(), BOUNDS) for text in TIMES),
        (b"\xff\xfe\x00garbage", " is damaged: line 3 is no JSON object.*"),
        (b"not json", " is damaged: line 3 is no JSON object.*"),
        (b"[1, 2]", " is damaged: line 3 is no JSON object.*"),
        (b"[" * 100_000, " is damaged: line 3 is no JSON object.*"),
        (b"a\nb\nc", " is damaged: 3 lines are no JSON objects, the first is line 3: .*"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(line: bytes, said: str, tmp_path: Path) -> None:
    write_run(tmp_path, [0.5] * 8)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    (problem,) = refusal_of(tmp_path)
    assert re.fullmatch(re.escape(f"--calibrate {tmp_path}: metrics.jsonl") + said, problem), problem


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "events.jsonl", "trace.json", "cluster.toml"])
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert main(["--calibrate", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert "1 problem\n" in text
    assert f"--calibrate {tmp_path}: {name} " in text


def test_a_cluster_file_is_readable_whatever_the_directory_is_called(tmp_path: Path) -> None:
    directory = tmp_path / 'a "run"\\\n\udc80'
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run")
    (tmp_path / "run").rename(directory)
    assert main(["--calibrate", str(directory)]) == 0
    assert load_cluster(directory / "cluster.toml").source.startswith("fitted to ")


CPU = CLUSTERS["cpu"]


def trace_of_pipeline(path: Path, costs: Costs, microbatches: int, steps: int = 2) -> float:
    """Write the trace of two ranks that compute and send as a simulation says; the seconds of a step."""
    schedule = build_schedule("1f1b", 2, microbatches)
    timeline = simulate(schedule, costs)
    end = {span.action: span.end for row in timeline.spans for span in row}
    ranks = []
    for rank, row in enumerate(timeline.spans):
        done: list[Timed] = []
        before = 0.0
        for span in row:
            done += _around(span, before, end)
            before = span.end
        length = timeline.end + 1e-3
        passes = tuple(
            TracedStep(
                number + 2,
                number * length,
                number * length + timeline.end,
                tuple(one._replace(start=number * length + one.start, end=number * length + one.end) for one in done),
                updated=number * length + timeline.end,
            )
            for number in range(steps)
        )
        ranks.append(RankTrace(coordinates={"pp": rank, "dp": 0, "tp": 0}, steps=passes))
    write_trace(path, ranks, schedule)
    return timeline.end


def _around(span: Span, before: float, end: dict[Action, float]) -> list[Timed]:
    """A computation, after the wait for what it needs and before the sending of its result."""
    waits = [
        Timed("wait", (pair[1],), before, max(span.start, before + 1e-7))
        for other in end
        if other.stage != span.action.stage and (pair := transfers_of(other, 2)) is not None
        for key in requirements(span.action, 2)
        if key[1:] == (other.stage, other.microbatch) and key[0] == ("output" if other.op.value == "F" else "gradient")
    ]
    sent = transfers_of(span.action, 2)
    posts = [] if sent is None else [Timed("post", (sent[0],), span.end, span.end + 1e-6)]
    return [*waits, Timed("compute", (span.action,), span.start, span.end), *posts]


def calibrated(directory: Path, rows: list[float], costs: Costs | None = None) -> Calibration:
    """The fit to a run of two stages with these logged steps, and a trace of these costs."""
    config = make_config((1, 2, 1), directory)
    config = replace(config, parallel=replace(config.parallel, schedule="1f1b"))
    save_toml(config, directory / "config.toml")
    records = [{"step": step, "perf/step_time_s": seconds} for step, seconds in enumerate(rows, start=1)]
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    if costs is not None:
        trace_of_pipeline(directory / "trace.json", costs, config.resolve(2).microbatches)
    return calibrate(read_run(directory), CPU)


def resolved(directory: Path) -> ResolvedConfig:
    config: ResolvedConfig = load_toml(directory / "config.toml", Config).resolve(2)
    return config


def lines_of(found: Calibration) -> list[str]:
    return calibration_text(found).splitlines()


def message_seconds(directory: Path) -> float:
    """Of the base's links."""
    config = resolved(directory)
    return stage_message(config).seconds(CPU.device)


def range_of(found: Calibration, directory: Path) -> list[float]:
    config = resolved(directory)
    layers = outline(config)
    cases: tuple[Case, ...] = ("fast", "expected", "slow")
    return [step_time(config, layers, found.cluster, case=case).seconds for case in cases]


def test_all_rows_without_the_first_are_used_and_their_spread_is_the_range(tmp_path: Path) -> None:
    rows = [9.0, 5.0, 4.0, 0.50, 0.40, 0.60, 0.50, 0.50, 0.45, 0.55, 0.50, 0.50]
    found = calibrated(tmp_path, rows)
    fast, expected, slow = range_of(found, tmp_path)
    assert expected == pytest.approx(0.5, rel=1e-3)
    assert fast == pytest.approx(0.5 / 1.136, rel=0.03)  # a tenth of the nine rows is below 0.44 s
    assert slow == pytest.approx(0.56, rel=0.03)  # and a tenth is above
    assert not found.doubts
    assert "low confidence" not in calibration_text(found)


def test_links_are_as_fast_as_messages_that_were_waited_for(tmp_path: Path) -> None:
    """The waits are for uneven stages, a hundred times the messages."""
    calibrated(tmp_path, [0.3] * 8)
    message = 2 * message_seconds(tmp_path)
    costs = Costs(forward=[0.01, 0.002], input_grad=[0.01, 0.002], weight_grad=[0.01, 0.002], transfer=message)
    end = trace_of_pipeline(tmp_path / "trace.json", costs, 4)
    found = calibrated(tmp_path, [end] * 8, costs)
    assert any(line.startswith("speed of the links: x 0.5, from") for line in lines_of(found))
    assert any(line.startswith("not measured: all-reduces over --tp ranks") for line in lines_of(found))
    link, base = found.cluster.device.node_link, CPU.device.node_link
    assert link.bandwidth == pytest.approx(base.bandwidth / 2, rel=0.02)
    assert link.latency == pytest.approx(base.latency * 2, rel=0.02)


def test_what_nothing_explains_is_reported_and_widens_the_range(tmp_path: Path) -> None:
    """Stages that differ more than the planner thinks make a step longer, and no link slower."""
    calibrated(tmp_path, [0.3] * 8)
    message = message_seconds(tmp_path)
    costs = Costs(forward=[0.03, 0.001], input_grad=[0.03, 0.001], weight_grad=[0.03, 0.001], transfer=message)
    end = trace_of_pipeline(tmp_path / "trace.json", costs, 4)
    found = calibrated(tmp_path, [end] * 8, costs)
    assert found.cluster.device.node_link.bandwidth == pytest.approx(CPU.device.node_link.bandwidth, rel=0.02)
    lines = lines_of(found)
    assert any(re.match(r"unexplained: \+.* s \(\+.*% of the prediction\)", line) for line in lines)
    assert not any(line.startswith("predicted with it") and "%" in line for line in lines)
    assert "more time than predicted" in found.doubts[-1]
    assert lines_of(found)[-1].startswith("low confidence")
    assert "low confidence" in found.cluster.source
    fast, expected, slow = range_of(found, tmp_path)
    assert fast < expected < 0.8 * end
    assert slow == pytest.approx(end, rel=0.1)
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(found.cluster), encoding="utf-8")
    assert load_cluster(path).source == found.cluster.source


HERE = Machine(cores=64, memory_bytes=512e9, source="of this machine")


@pytest.mark.parametrize(
    ("about", "name", "expected"),
    [
        ({"cores": 4, "memory_bytes": 8e9}, None, (4, 8e9)),
        ({"cores": 4, "memory_bytes": 8e9}, "laptop", (4, 8e9)),
        ({"cores": 4, "memory_bytes": 8e9}, "mine.toml", None),  # whose figures are the user's
        ({}, None, (64, 512e9)),
        ({"cores": -4, "memory_bytes": "much"}, None, (64, 512e9)),
        ({"host": socket.gethostname()}, None, (64, 512e9)),
        ({"host": "elsewhere"}, None, None),
        ({"host": "elsewhere", "cores": 4, "memory_bytes": 8e9}, None, (4, 8e9)),
    ],
)
def test_memory_and_cores_are_those_that_the_run_recorded(
    about: dict[str, object], name: str | None, expected: tuple[int, float] | None, tmp_path: Path
) -> None:
    calibrated(tmp_path, [0.3] * 8)  # a run of two ranks, that recorded this
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "launch", **about}) + "\n", encoding="utf-8")
    found = machine_of(name, CPU, read_run(tmp_path), HERE)
    assert (None if found is None else (found.cores, found.memory_bytes)) == expected
