"""The pictures of schedules and plans, read back: boxes stand where the simulator says, and what is written is true."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from xml.etree import ElementTree

import pytest

from megacore.drawing import canvas
from megacore.drawing.canvas import Words
from megacore.drawing.curves import Curve, curves
from megacore.drawing.trace_file import RankTrace, TracedStep, write_trace
from megacore.errors import UserError
from megacore.pipeline.schedule import Schedule, Timed, build_schedule
from megacore.pipeline.simulator import Costs, simulate
from megacore.plan.closed_forms import closed_form
from megacore.plan.cluster import CLUSTERS
from megacore.plan.memory import GIB
from megacore.plan.plan_picture import frontier_picture
from megacore.plan.planner import make_plan, scheduled
from megacore.plan.search import Found, Layout
from megacore.plan.stage_time import speed_of
from megacore.plan.step_time import pipeline_costs, timeline
from tests.parity.runs import make_config
from tests.unit.packaging_builds import ROOT
from tests.unit.planning import planned, resolved
from tools.draw_schedule import main
from tools.plan import main as plan_main

SVG = "{http://www.w3.org/2000/svg}"
EVEN = (1.0, 1.0, 1.0)
# name, ranks, microbatches, virtual stages, costs of a rank, transfer
CASES: list[tuple[str, int, int, int, tuple[float, float, float], float]] = [
    ("1f1b", 4, 8, 1, EVEN, 0.0), ("gpipe", 3, 5, 1, (1.0, 0.5, 0.25), 0.1), ("interleaved", 4, 6, 3, EVEN, 0.0),
    ("zero-bubble", 4, 8, 1, (1.0, 1.2, 0.8), 0.0), ("zb-v", 3, 6, 2, EVEN, 0.1),
    ("1f1b", 12, 64, 1, EVEN, 0.0), ("1f1b", 1, 1, 1, EVEN, 0.0),
]  # fmt: skip


def plain(name: str, ranks: int, microbatches: int) -> list[str]:
    return ["--schedule", name, "--pp", str(ranks), "--microbatches", str(microbatches)]


class Drawn(NamedTuple):
    """A box of a picture, with its place in pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    note: str


def boxes(path: Path) -> list[Drawn]:
    """The boxes with a note, in the order of drawing."""
    found = []
    for element in ElementTree.parse(path).iter(f"{SVG}rect"):
        if (note := element.find(f"{SVG}title")) is not None:
            x, y, width, height = (float(element.attrib[side]) for side in ("x", "y", "width", "height"))
            found.append(Drawn(x, y, width, height, element.attrib["fill"], note.text or ""))
    return found


def drawn_spans(path: Path, end: float) -> list[dict[str, tuple[float, float]]]:
    """For each row from the top: computation -> when it begins and ends; the shaded row is the time from 0 to `end`."""
    rows: list[dict[str, tuple[float, float]]] = []
    for box in boxes(path):
        if box.note == "bubble":
            origin, scale = box.x, end / box.width
            rows.append({})
            continue
        name, _ = box.note.split(":")
        rows[-1][name] = ((box.x - origin) * scale, (box.x + box.width - origin) * scale)
    return rows


def costs_of(schedule: Schedule, times: tuple[float, float, float], transfer: float) -> Costs:
    f, b, w = ([time / schedule.virtual_stages] * schedule.stages for time in times)
    return Costs(forward=f, input_grad=b, weight_grad=w, transfer=transfer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_boxes_are_the_simulators_spans(case: Any, tmp_path: Path) -> None:
    name, ranks, microbatches, virtual, times, transfer = case
    words = plain(name, ranks, microbatches) + (["--virtual-stages", str(virtual)] if virtual > 1 else [])
    words += ["--costs", ",".join(map(str, times)), "--transfer", str(transfer)]
    assert main([*words, "-o", str(tmp_path / "out.svg")]) == 0
    schedule = build_schedule(name, ranks, microbatches, virtual)
    timeline = simulate(schedule, costs_of(schedule, times, transfer))
    for row, spans in zip(drawn_spans(tmp_path / "out.svg", timeline.end), timeline.spans, strict=True):
        assert list(row) == [str(span.action) for span in spans]
        for span in spans:  # places are written to a thousandth of a pixel
            assert row[str(span.action)] == pytest.approx((span.start, span.end), abs=1e-3 * timeline.end / 100)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.9), (2.0, 1.5, 1.5), (1.0, 1.0, 1.5)], ids=str)
@pytest.mark.parametrize(
    "name, virtual",
    [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipev", 2)],
)
def test_a_closed_form_is_given_only_where_it_holds(name: str, virtual: int, times: tuple[float, float, float]) -> None:
    given = 0
    for ranks in range(1, 6):
        for microbatches in range(1, 11):
            schedule = build_schedule(name, ranks, microbatches, virtual)
            costs = costs_of(schedule, times, 0.0)
            if (form := closed_form(schedule, costs)) is not None:
                assert simulate(schedule, costs).idle_share == pytest.approx(form.value, abs=1e-9)
                given += 1
    assert given or times == (1.0, 1.0, 1.5) or (schedule.is_v and times != EVEN)


# ---- in the terminal


def test_the_tool_does_not_load_torch() -> None:
    code = "import sys; from tools.draw_schedule import main; main(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code, *plain("gpipe", 2, 2)], cwd=ROOT, check=False).returncode == 0


# ---- other forms


def test_a_png_shows_the_same_boxes(tmp_path: Path) -> None:
    from matplotlib.image import imread

    for suffix in ("svg", "png"):
        assert main([*plain("zero-bubble", 3, 4), "-o", str(tmp_path / f"out.{suffix}")]) == 0
    image = imread(tmp_path / "out.png")  # [height, width, rgba], two pixels for one
    for box in boxes(tmp_path / "out.svg"):
        if box.note != "bubble":
            corner = image[round(2 * (box.y + 4)), round(2 * (box.x + 4))][:3]
            assert [round(255 * float(part)) for part in corner] == list(bytes.fromhex(box.fill[1:]))


COMMANDS = re.findall(
    r"^python tools/draw_schedule.py (.*docs/pictures/.*)$",
    (ROOT / "docs/explain/schedules.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pictures_of_the_documentation_are_current(command: str, tmp_path: Path) -> None:
    *flags, picture = shlex.split(command)
    assert main([*flags, str(tmp_path / "out.svg")]) == 0
    assert (tmp_path / "out.svg").read_bytes() == (ROOT / picture).read_bytes()


def test_the_terminal_of_the_documentation_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plain("1f1b", 4, 8)) == 0
    assert f"```text\n{capsys.readouterr().out}```\n" in (ROOT / "docs/explain/schedules.md").read_text()
    assert main(plain("1f1b", 12, 64)) == 0  # more than there is room for
    assert {len(line) for line in capsys.readouterr().out.splitlines() if line.startswith("rank ")} == {80}


# ---- refusals


def test_png_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megacore.drawing.canvas.importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main([*plain("1f1b", 2, 4), "-o", "out.png"]) == 2
    assert "-o out.png needs matplotlib, which is not installed: use -o out.svg, or" in capsys.readouterr().err


# ---- traces ----------------------------------------------------------------------------------------------------------

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


def of_ranks(pp: int | str) -> Callable[[dict[str, Any]], object]:
    return lambda c: [e["args"].update(pp=pp) for e in c["traceEvents"] if e["name"] == "process_name"]


@pytest.mark.parametrize(
    "change, said",
    [
        (everywhere("dur", 0), NOT_ONE),
        (everywhere("dur", math.nan), NOT_ONE),
        (everywhere("ts", math.nan), NOT_ONE),
        (everywhere("step", None), NOT_ONE),
        (lambda c: c["otherData"].update(virtual_stages="1"), NOT_ONE),
        (lambda c: c["otherData"].update(schedule=["1f1b"]), NOT_ONE),
        (lambda c: c.update(traceEvents=[]), NOT_ONE),
        (lambda c: of(c, "0F1").update(dur=1000.0), "is not whole: rank 0: 0B0 begins before 0F1 ends"),
        (lambda c: of(c, "0F1").update(ts=905.0, dur=90.0), "is not whole: the schedule deadlocks: rank 0 waits"),
        (lambda c: of(c, "0B2").update(name="0I2"), "is not whole: rank 0 never does 0W2"),
        (lambda c: c["otherData"].update(microbatches=2), "is not whole: rank 0: 0F2 does not exist"),
        (lambda c: c["otherData"].update(microbatches=4), "is not whole: rank 0 never does 0F3"),
        (of_ranks(0), "is not whole: its processes are the pipeline ranks 0, 0"),
        (of_ranks("a"), NOT_ONE),
    ],
)
def test_a_trace_that_cannot_be_right_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(planned_trace(tmp_path / "t.json", change)) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1
    assert said in errors
    (tmp_path / "t.json").write_text("[" * 200_000)
    assert main(["--from-trace", str(tmp_path / "t.json")]) == 2
    assert NOT_ONE in capsys.readouterr().err


def test_clocks_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second rank's clock is 150 microseconds late: its forwards seem to begin before they have their input."""

    def change(content: dict[str, Any]) -> None:
        for event in content["traceEvents"]:
            if event.get("cat") == "compute":
                event["ts"] += 1000.0 - 150.0 * event["pid"]

    assert main([*planned_trace(tmp_path / "t.json", change), "-o", str(tmp_path / "t.svg")]) == 0
    assert "the ranks' clocks differ by at least 0.15 ms" in capsys.readouterr().out.splitlines()[1]


# ---- pictures of plans -----------------------------------------------------------------------------------------------


def test_pictures_are_drawn_although_nobody_reads_the_report(tmp_path: Path) -> None:
    """And one that cannot be written leaves the file as it was."""
    paths = [tmp_path / f"{name}.svg" for name in ("timeline", "memory-timeline")]
    given = [word for path in paths for word in (f"--{path.stem}", str(path))]
    command = [sys.executable, "tools/plan.py", "pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", "h100"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [*command, "--global-batch-size", "2", "--estimate", *given]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        streams: dict[str, Any] = {"stdout": writer, "stderr": subprocess.PIPE, "cwd": ROOT, "env": environment}
        done = subprocess.run(words, check=False, **streams)
        assert (done.returncode, [path.is_file() for path in paths]) == (141, [True] * len(paths)), done.stderr
        before = [path.read_bytes() for path in paths]
        small_files = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *words]
        done = subprocess.run(small_files, check=False, **streams)
        assert (done.returncode, done.stderr.count(b": File too large; ")) == (2, len(paths)), done.stderr
        assert [path.read_bytes() for path in paths] == before and sorted(tmp_path.iterdir()) == sorted(paths)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("flags", "pictures"),
    [("", ("timeline", "memory-timeline")), ("--world-size 2 --search --max-micro-batch-size 1", ("picture",))],
)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), UserError("it has no size")])
def test_a_picture_that_fails_does_not_lose_the_report(
    flags: str, pictures: tuple[str, ...], error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor the pictures after it."""
    paths = [tmp_path / f"{name}.svg" for name in pictures]
    words = f"pretrain_gpt.py --preset gpt2-small --cluster h100 --global-batch-size 2 --json {flags}".split()
    assert plan_main(words) == 0
    expected = json.loads(capsys.readouterr().out)
    given = [word for name, path in zip(pictures, paths, strict=True) for word in (f"--{name}", str(path))]
    with mock.patch.object(canvas, "to_svg", side_effect=[error, "<svg/>"]):
        assert plan_main([*words, *given]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out).keys() == expected.keys()
    said = "it has no size" if isinstance(error, UserError) else f"{paths[0]}: No space left on device; make room"
    assert said in err
    assert [path.is_file() for path in paths[1:]] == [True] * (len(paths) - 1)


def test_a_picture_replaces_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    canvas.save(canvas.Drawing(title="a title", width=100, height=100), tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink() and "a title" in (tmp_path / "real.svg").read_text(encoding="utf-8")
    os.mkfifo(tmp_path / "pipe.svg")
    with pytest.raises(UserError, match=r"pipe\.svg is not a regular file"):
        canvas.save(canvas.Drawing(title="a title", width=100, height=100), tmp_path / "pipe.svg")


def found_of(sizes: Sequence[tuple[float, float]]) -> Found:
    """A search whose layouts take so many seconds and so much of 10 GiB."""
    config = make_config((1, 1, 1), "")
    return Found(
        layouts=[Layout(config=config, seconds=seconds, memory_bytes=size * GIB) for seconds, size in sizes],
        tried=8,
        left_out=0,
        least_memory=None,
        capacity=10 * GIB,
        cluster=CLUSTERS["h100"],
        wall_seconds=1.0,
    )


def numbers_in(found: Found) -> str:
    """The numbers of the picture; those of layouts stand within the frame."""
    marks = frontier_picture(found).marks
    words = [mark for mark in marks if isinstance(mark, Words) and re.fullmatch(r"[0-9.,]+", mark.text)]
    (frame,) = (mark for mark in marks if isinstance(mark, canvas.Box) and mark.fill == "none")
    assert all(w.x - 8 > frame.x and w.y + 8 < frame.y + frame.height for w in words if w.color != Words.color)
    return " ".join(mark.text for mark in words)


def test_a_frontier_has_no_two_layouts_that_are_alike() -> None:
    """And the axes of its picture have round numbers, also for a single layout, in the unit of the table."""
    sizes = [(1.0, 9.0), (1.002, 8.0), (1.004, 6.0), (1.006, 5.99), (1.2, 5.0), (1.2, 7.0), (1.3, 4.99), (2.0, 3.0)]
    found = found_of(sizes)
    assert [layout.seconds for layout in found.frontier] == [1.004, 1.2, 2.0]
    assert numbers_in(found) == "1.0 1.2 1.4 1.6 1.8 2.0 4,000 5,000 6,000 7,000 8,000 9,000 1 2 3"
    assert numbers_in(dataclasses.replace(found, layouts=found.layouts[:1])).startswith("0.6 0.8 1.0 1.2 1.4 ")
    many = frontier_picture(found_of([(1.05**n, 9 - 0.4 * n) for n in range(15)] + [(5000.0, 9.5)] * 1200)).marks
    texts = " ".join(mark.text for mark in many if isinstance(mark, Words))
    assert "of 15 layouts, the 12 fastest with a number" in texts
    assert "not drawn: 1,200 that take more than 4 times the fastest" in texts
    curves("losses that are not finite", [Curve(title="", points=[(1, math.nan), (2, math.inf)])], x_title="")


@pytest.mark.parametrize(
    "schedule", ["zero-bubble", pytest.param("interleaved --virtual-stages 5", marks=pytest.mark.slow)]
)
def test_a_long_step_is_drawn_with_fewer_microbatches(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words have the bubble of the whole step."""
    path = tmp_path / "line.svg"
    flags = (
        "--preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 4608 --micro-batch-size 2 --zero-stage 1 "
        f"--precision bf16 --schedule {schedule}"
    )
    plan = planned(capsys, f"pretrain_gpt.py {flags} --cluster a100-80g --timeline {path}")
    text = path.read_text(encoding="utf-8")
    assert "12 ranks, a100-80g: a step with 24 microbatches in place of 288" in text
    found = re.search("288 microbatches: step [0-9.]+ s, bubble of the busiest rank ([0-9.]+)% of it", text)
    assert found is not None
    whole = plan["step_parts"]["bubble"]["value"] / plan["step_seconds"]["value"]
    assert float(found.group(1)) / 100 == pytest.approx(whole, abs=1e-3)
    cluster = CLUSTERS["a100-80g"]
    same = make_plan(scheduled(resolved(f"{flags} --mock-data --train-iters 10"), cluster), cluster)
    costs = pipeline_costs(same.config, same.time.stages, speed_of(same.config, cluster, "expected"))
    line = timeline(same.config, costs.times(1e3), 24)
    spans = {str(span.action): (span.start, span.end) for spans in line.spans for span in spans}
    drawn = re.findall(r"<title>([0-9]+[FBIW][0-9]+): .* from ([0-9.e+]+) to ([0-9.e+]+)</title>", text)
    assert [name for name, *_ in drawn] == [*spans]
    for name, start, end in drawn:
        assert (float(start), float(end)) == pytest.approx(spans[name], abs=1e-5 * line.end)
