"""metrics.jsonl: what an earlier run left is neither overwritten nor doubled, and every line is strict JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megacore.errors import UserError
from megacore.train.sinks import Report


def report(directory: Path, first_step: int) -> Report:
    return Report(directory, train_iters=10, first_step=first_step, quiet=False)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_does_not_double_steps(tmp_path: Path) -> None:
    first = report(tmp_path, 0)
    for step in range(1, 7):
        first.record({"step": step})
    first.close()
    second = report(tmp_path, 2)
    second.record({"step": 3})
    second.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


@pytest.mark.parametrize("line", ["garbage", "{}", "[]", '{"step": "3"}', '{"step": null}', "\xff", "[" * 100_000])
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    content = ('{"step": 1}\n' + line + '\n{"step": 2}\n').encode("latin-1")
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not a record of a run"):
        report(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_a_fresh_run_sets_the_earlier_metrics_aside(tmp_path: Path) -> None:
    for _ in range(3):
        one = report(tmp_path, 0)
        one.record({"step": 1})
        one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2"]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    one = report(tmp_path, 0)
    one.record({"step": 1, "train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 0.1})
    one.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: name) == {
        "step": 1,
        "train/loss": None,
        "train/grad_norm": None,
        "train/lr": 0.1,
    }
