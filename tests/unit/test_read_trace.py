"""Traces from files: drawn where they are whole, and refused in one line where they cannot be what a run did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.pipeline.schedule import Timed, build_schedule
from megacore.pipeline.simulator import Costs, simulate
from megacore.pipeline.trace_file import RankTrace, TracedStep, write_trace
from tools.draw_schedule import main

NOT_ONE = "is not a trace.json that a run with --trace wrote"


def planned_trace(path: Path, change: Callable[[dict[str, Any]], None] = lambda content: None) -> list[str]:
    """The flags that draw a trace of two ranks, changed after it was written; a forward takes 100 microseconds."""
    schedule = build_schedule("1f1b", 2, 3)
    timeline = simulate(schedule, Costs.uniform(2))
    ranks = []
    for rank, spans in enumerate(timeline.spans):
        done = tuple(Timed("compute", (s.action,), 1e-4 * s.start, 1e-4 * s.end) for s in spans)
        ranks.append(RankTrace(coordinates={"pp": rank, "dp": 0, "tp": 0}, steps=(TracedStep(2, 0.0, 1.2e-3, done),)))
    write_trace(path, ranks, schedule)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return ["--from-trace", str(path)]


def of(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The event of a computation."""
    (found,) = (event for event in content["traceEvents"] if event["name"] == name)
    assert isinstance(found, dict)
    return found


def everywhere(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for event in content["traceEvents"]:
            if event.get("cat") == "compute":
                (event if key in event else event["args"])[key] = value

    return change


def test_a_trace_is_drawn_as_it_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*planned_trace(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg")]) == 0
    simulated, measured = capsys.readouterr().out.splitlines()
    assert "simulated with each stage's mean times: " in simulated and "simulated bubble 25.0% of" in simulated
    assert measured.endswith("1.2 ms: measured bubble 25.0% of the ranks' time")


@pytest.mark.parametrize(
    "change, said",
    [
        (everywhere("dur", 0), NOT_ONE),
        (everywhere("dur", math.nan), NOT_ONE),
        (everywhere("dur", 1e308), NOT_ONE),
        (everywhere("ts", math.nan), NOT_ONE),
        (everywhere("ts", True), NOT_ONE),
        (everywhere("step", None), NOT_ONE),
        (everywhere("step", "2"), NOT_ONE),
        (lambda c: c["otherData"].update(virtual_stages="1"), NOT_ONE),
        (lambda c: c["otherData"].update(virtual_stages=None), NOT_ONE),
        (lambda c: c["otherData"].update(microbatches="1"), NOT_ONE),
        (lambda c: c["otherData"].update(schedule=["1f1b"]), NOT_ONE),
        (lambda c: c.update(traceEvents=[]), NOT_ONE),
        (lambda c: of(c, "0F1").update(dur=-10.0), NOT_ONE),
        (lambda c: of(c, "0F1").update(dur=1000.0), "is not whole: rank 0: 0B0 begins before 0F1 ends"),
        (lambda c: of(c, "0F1").update(ts=905.0, dur=90.0), "is not whole: the schedule deadlocks: rank 0 waits"),
        (lambda c: of(c, "0B2").update(name="0I2"), "is not whole: rank 0 never does 0W2"),
        (lambda c: c["otherData"].update(microbatches=2), "is not whole: rank 0: 0F2 does not exist"),
        (lambda c: c["otherData"].update(microbatches=4), "is not whole: rank 0 never does 0F3"),
        (lambda c: c["otherData"].update(virtual_stages=2), "is not whole: "),
        (
            lambda c: [e["args"].update(pp=0) for e in c["traceEvents"] if e["name"] == "process_name"],
            "is not whole: its processes are the pipeline ranks 0, 0",
        ),
        (
            lambda c: [e["args"].update(pp="a") for e in c["traceEvents"] if e["name"] == "process_name"],
            NOT_ONE,
        ),
    ],
)
def test_a_trace_that_cannot_be_right_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(planned_trace(tmp_path / "t.json", change)) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1
    assert said in errors


def test_a_deeply_nested_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text("[" * 200_000)
    assert main(["--from-trace", str(tmp_path / "t.json")]) == 2
    assert NOT_ONE in capsys.readouterr().err


def test_clocks_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second rank's clock is 150 microseconds late: its forwards seem to begin before they have their input."""

    def change(content: dict[str, Any]) -> None:
        for event in content["traceEvents"]:
            if event.get("cat") == "compute" and event["pid"] == 1:
                event["ts"] += 1000.0 - 150.0
            elif event.get("cat") == "compute":
                event["ts"] += 1000.0

    assert main([*planned_trace(tmp_path / "t.json", change), "-o", str(tmp_path / "t.svg")]) == 0
    assert "the ranks' clocks differ by at least 0.15 ms" in capsys.readouterr().out.splitlines()[1]
