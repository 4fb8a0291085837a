"""tools/plan.py --fit: half of each published set predicts the other half; --calibrate by a run; cluster files."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import statistics
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megacore.config.toml import save_toml
from megacore.errors import ConfigError
from megacore.models.outline import outline
from megacore.parallel.processors import available_cores
from megacore.plan.calibration import calibrate, calibration_text, machine_of
from megacore.plan.cluster import CLUSTERS, cluster_named, fields_of, load_cluster, to_toml
from megacore.plan.measured_run import Machine, read_run
from megacore.plan.row_fit import MeasuredRow, fit_rows
from megacore.plan.step_time import step_seconds
from tests.parity.runs import make_config
from tests.plans.published import A100, MEGATRON_LM, Run, megatron_runs, single_node_runs
from tests.plans.table import error_with, measured_rows
from tests.unit.planning import planned
from tools.plan import main

LAYOUT = "--micro-batch-size 8 --global-batch-size 512 --tp 2 --dp 32"
MODEL = "--hidden-size 3072 --num-layers 30 --num-attention-heads 32 --vocab-size 51200"
COMMAND = (
    f"pretrain_gpt.py --cluster a100-80g --software megatron-lm {MODEL} {LAYOUT} --seq-length 2048 --precision fp16 "
    "--recompute full --no-overlap-grad-reduce --estimate"
)
ROWS = Path(__file__).parent / "megatron_a100.csv"


def of_hidden(hidden: int) -> list[Run]:
    """Every second layout of the width, which is as many as a test has time for."""
    return [run for run in single_node_runs() if f"hidden {hidden}," in run.model][::2]


@pytest.mark.parametrize(
    ("runs", "most", "before"),
    [
        (list(megatron_runs()), 0.03, 0.06),
        pytest.param(of_hidden(1024), 0.02, 0.035, marks=pytest.mark.slow),
        pytest.param(of_hidden(2048), 0.03, 0.07, marks=pytest.mark.slow),
    ],
    ids=["many nodes", "hidden 1024", "hidden 2048"],
)
def test_half_of_a_set_predicts_the_other_half(runs: list[Run], most: float, before: float) -> None:
    base = runs[0].computed_by
    fit = fit_rows(measured_rows(runs[::2]), base)
    others = measured_rows(runs[1::2])

    assert error_with(fit.cluster, others) <= most
    assert error_with(base, others) >= before
    assert fit.median_left_out < statistics.median(abs(fit.before))
    assert statistics.median(abs(fit.after)) <= most


def half_of_published() -> str:
    """Every second row of 3.6B as a user has it: a comment, words of another table, a label."""
    with ROWS.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(line for line in file if line[0] != "#") if "3.6B" in row["model"]]
    text = io.StringIO()
    text.write("# Megatron-LM on A100\nmodel,# GPUs,tensor parallelism,pp,micro batch,iteration time (ms)\n")
    for row in rows[::2]:
        text.write(f"{row['model']},64,{row['tp']},{row['pp']},{row['micro_batch']},{float(row['seconds']) * 1e3}\n")
    return text.getvalue()


def test_a_command_plans_with_the_rows_and_its_file_does_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, file = tmp_path / "rows.csv", tmp_path / "fitted.toml"
    rows.write_text(half_of_published(), encoding="utf-8")
    fitted = planned(capsys, f"{COMMAND} --fit {rows} --fit-out {file}")
    fit = fitted["fitted"]
    assert fit["kept"] and len(fit["rows"]) == 13
    errors = [abs(row["fitted_error"]) for row in fit["rows"] if not row["set_aside"]]
    assert fit["median_errors"]["fitted_error"] < max(errors) < 0.05
    assert fit["constants"]["network between nodes"]["shipped"] == {
        "value": 0.65, "unit": "share of the bandwidth between nodes", "origin": "assumed", "low": None, "high": None
    }  # fmt: skip
    again = planned(capsys, COMMAND.replace("a100-80g", str(file)).replace("--software megatron-lm", ""))
    assert again["step_seconds"]["value"] == pytest.approx(fitted["step_seconds"]["value"], rel=1e-12)
    assert again["step_seconds"]["origin"] == "fitted"
    assert again["step_seconds"]["value"] == pytest.approx(3.9752, rel=0.05)  # as measured
    parts = [part["value"] for name, part in again["step_parts"].items()]
    assert sum(parts) == pytest.approx(again["step_seconds"]["value"])
    cluster = load_cluster(file)
    assert cluster.software.name == MEGATRON_LM.name
    assert cluster.layouts is not None
    assert main(f"{COMMAND} --fit {rows}".split()) == 0
    text = capsys.readouterr().out
    assert "Fit of 13 rows" in text and "| network between nodes | 65.0% of the bandwidth |" in text
    assert "| left out |" in text and "| line | measured |" in text


def test_rows_that_say_nothing_leave_the_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured times that the planner predicts: no fit can be better."""
    runs = list(megatron_runs())[:6]
    rows = [
        MeasuredRow(line=0, config=run.config, seconds=step_seconds(run.config, outline(run.config), run.computed_by))
        for run in runs
    ]
    fit = fit_rows(rows, runs[0].computed_by)
    assert not fit.is_kept
    assert fit.cluster.device == A100.device


def test_files_that_are_no_tables_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else is refused stands in tests/tools.toml."""
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    (tmp_path / "huge").write_bytes(b"a" * (1 << 23))
    (tmp_path / "long").write_text("\ufefftp,seconds\n" + "1,2\n" * 3000, encoding="utf-8")
    said = {"binary": "is not text", "huge": "bytes", "long": "has 3,000 rows: leave at most 2,000"}
    for name, reason in said.items():
        assert main(f"{COMMAND} --fit {tmp_path / name}".split()) == 2
        assert reason in capsys.readouterr().err


# ---- --calibrate -----------------------------------------------------------------------------------------------------


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


TIMES = ("-1.0", "0", "1e300", "NaN", "Infinity", "-Infinity", "true", "null", '"fast"', "[1]", "1e-9", "9" * 300)
BOUNDS = r" line 3: perf/step_time_s = .{1,40} must be a number of seconds from 1e-06 to 1,000,000"


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


# ---- cluster files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_is_read_back_as_it_is_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(CLUSTERS[name]), encoding="utf-8")
    read, expected = load_cluster(path), CLUSTERS[name]
    assert fields_of(read) == pytest.approx(fields_of(expected))
    assert read.peaks == pytest.approx(expected.peaks)
    assert read.device.network_efficiency == expected.device.network_efficiency
    assert read.device.node_mesh == expected.device.node_mesh
    assert read.notes == ()
    assert all(expected.peak(precision) for precision in ("fp32", "bf16", "fp16"))


def holds(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "cannot be read: Is a directory"),
    "pipe": (os.mkfifo, "cannot be read: is not a regular file"),
    "empty": (holds(b""), "is empty: give its fields"),
    "binary": (holds(b"\xff\x00"), "is not valid TOML: it is not text in UTF-8"),
    "nested": (holds(b"a = " + b"[" * 100_000), "is not valid TOML: its values are nested too deeply"),
    "huge": (holds(b"#" * (1 << 21)), "cannot be read: has 2,097,152 bytes, more than the 1,048,576 that are read"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_cluster_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path, (make, said) = tmp_path / "own.toml", ODD[kind]
    make(path)
    with pytest.raises(ConfigError) as refused:
        cluster_named(str(path))
    (problem,) = refused.value.problems
    assert problem.startswith(f"--cluster {path} {said}")


MIXED = "[[kinds]]\nbased_on = 'a100-80g'\nnodes = 2\n[[kinds]]\nbased_on = '{}'\nnodes = 1\n"


@pytest.mark.parametrize(
    ("ranks", "other", "slowest", "least"),
    [
        (16, "a100-40g", "a100-80g", "a100-80g"),  # which the first two nodes hold
        (17, "a100-40g", "a100-40g", "a100-40g"),
        (24, "h100", "a100-80g", "h100"),
    ],
)
def test_the_slowest_and_the_smallest_of_two_kinds(
    ranks: int, other: str, slowest: str, least: str, tmp_path: Path
) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED.format(other), encoding="utf-8")
    used, slow = load_cluster(path).used_by(ranks), CLUSTERS[slowest]
    assert used.device.memory_bytes == pytest.approx(CLUSTERS[least].device.memory_bytes)
    assert used.device.memory_bandwidth == pytest.approx(slow.device.memory_bandwidth)
    assert used.peaks["bf16"] == slow.peaks["bf16"]
    assert used.device.product_efficiency == slow.device.product_efficiency
    price = 1.8 if ranks == 16 else (2 * 1.8 + CLUSTERS[other].price_per_hour) / 3
    assert used.price_per_hour == pytest.approx(price)
    assert used.chip == ("" if other == "h100" and ranks > 16 else "a100")
