"""tools/plan.py --calibrate: a speed fitted to a run; what its steps say of the range; whose machine the cluster is."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacore.config.cli import save_toml
from megacore.errors import ConfigError
from megacore.parallel.processors import available_cores
from megacore.plan.calibration import calibrate, calibration_text, machine_of
from megacore.plan.cluster import CLUSTERS, load_cluster, to_toml
from megacore.plan.measured_run import Machine, read_run
from tests.parity.runs import make_config
from tests.unit.planning import numbers_without_unit, planned
from tools.plan import main


def write_run(directory: Path, seconds: Sequence[object] = (9.0, 0.5, 0.5, 0.5)) -> None:
    """What a run of one rank with these step times leaves."""
    save_toml(make_config((1, 1, 1), directory), directory / "config.toml")
    rows = [{"step": step, "perf/step_time_s": value} for step, value in enumerate(seconds)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


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


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "events.jsonl", "cluster.toml"])
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


def test_all_rows_without_the_first_are_used_and_their_spread_is_the_range(tmp_path: Path) -> None:
    write_run(tmp_path, [9.0, 5.0, 4.0, 0.50, 0.40, 0.60, 0.50, 0.50, 0.45, 0.55, 0.50, 0.50])
    found = calibrate(read_run(tmp_path), CPU)
    assert found.seconds.expected == pytest.approx(0.5, rel=1e-3)
    assert found.seconds.fast == pytest.approx(0.5 / 1.136, rel=0.03)  # a tenth of the nine rows is below 0.44 s
    assert found.seconds.slow == pytest.approx(0.56, rel=0.03)  # and a tenth is above
    assert not found.doubts
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(found.cluster), encoding="utf-8")
    assert load_cluster(path).source == found.cluster.source


def test_steps_that_differ_much_make_the_fit_doubtful(tmp_path: Path) -> None:
    write_run(tmp_path, [9.0, *[0.2, 0.6] * 6])
    found = calibrate(read_run(tmp_path), CPU)
    assert "low confidence: steps differ by a factor of 3" in found.cluster.source
    assert calibration_text(found).splitlines()[-1].startswith("low confidence: steps differ by a factor of 3.")


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
    write_run(tmp_path)  # and it recorded this
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "launch", **about}) + "\n", encoding="utf-8")
    found = machine_of(name, CPU, read_run(tmp_path), HERE)
    assert (None if found is None else (found.cores, found.memory_bytes)) == expected
