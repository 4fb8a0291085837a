"""tools/plan.py --fit: half of each published set predicts the other half; files are read back; refusals."""

from __future__ import annotations

import csv
import io
import statistics
from pathlib import Path

import pytest

from megacore.models.outline import outline
from megacore.plan.cluster import load_cluster
from megacore.plan.row_fit import MeasuredRow, fit_rows
from megacore.plan.step_time import step_seconds
from tests.plans.published import A100, MEGATRON_LM, Run, megatron_runs, single_node_runs
from tests.plans.table import error_with, measured_rows
from tests.unit.planning import numbers_without_unit, planned
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
    assert fit["kept"] and len(fit["rows"]) == 13 and list(numbers_without_unit(fit, fit["numbers"])) == []
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
