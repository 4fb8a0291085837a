"""metrics.jsonl: what an earlier run left is neither overwritten nor doubled, and every line is strict JSON."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megacore import files
from megacore.errors import StorageError, UserError
from megacore.observe.sinks import MetricsFile, finish
from megacore.train.callbacks import Event


def metrics(directory: Path, first_step: int, *, may_drop: bool = False) -> MetricsFile:
    return MetricsFile(directory, first_step=first_step, say=print, may_drop=may_drop)


def record(values: dict[str, Any]) -> Event:
    return Event(values["step"], "log", values)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(directory: Path, first_step: int, *records: dict[str, Any]) -> None:
    """What a run writes."""
    one = metrics(directory, first_step)
    for values in records:
        one.take(record(values))
    finish([one])


@pytest.mark.parametrize("line", ["garbage", "{}", "[]", '{"step": "3"}', '{"step": null}', "\xff", "[" * 100_000])
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    content = ('{"step": 1}\n' + line + '\n{"step": 2}\n').encode("latin-1")
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not a record of a run"):
        metrics(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_a_fresh_run_sets_the_earlier_metrics_aside(tmp_path: Path) -> None:
    for _ in range(3):
        write(tmp_path, 0, {"step": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.1", "metrics.jsonl.2"]


def test_a_resumed_run_does_not_double_steps(tmp_path: Path) -> None:
    write(tmp_path, 0, *({"step": step} for step in range(1, 7)))
    write(tmp_path, 2, {"step": 3})
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    write(tmp_path, 0, {"step": 1, "train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 0.1})
    found = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: name)
    assert found == {"step": 1, "train/loss": None, "train/grad_norm": None, "train/lr": 0.1}


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the disk still takes; a write beyond them is cut short, and the next one fails."""
    left, write = [10**6], os.write

    def write_some(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(files.os, "write", write_some)
    return left


def test_a_record_that_cannot_be_written_leaves_no_half_of_a_line(
    tmp_path: Path, room: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    one = metrics(tmp_path, 0, may_drop=True)
    for step, left in enumerate((1000, 5, 0, 1000), start=1):
        room[0] = left
        one.take(record({"step": step}))
    finish([one])
    assert steps(tmp_path / "metrics.jsonl") == [1, 4]
    path = tmp_path / "metrics.jsonl"
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"warning: {path}: No space left on device; what cannot be written is left out")
    assert last == f"warning: {path} lacks 2 records, which could not be written"


def test_a_run_that_is_to_stop_does_and_keeps_whole_lines(tmp_path: Path, room: list[int]) -> None:
    one = metrics(tmp_path, 0)
    one.take(record({"step": 1}))
    room[0] = 5
    with pytest.raises(StorageError, match=r"metrics\.jsonl: No space left on device"):
        one.take(record({"step": 2}))
    assert steps(tmp_path / "metrics.jsonl") == [1]
