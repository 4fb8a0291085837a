"""The pictures of schedules, read back: boxes stand where the simulator says, and what is written above is true."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megacore.pipeline.schedule import Action, Schedule, build_schedule
from megacore.pipeline.simulator import Costs, simulate
from megacore.plan.closed_forms import closed_form
from tests.unit.packaging_builds import ROOT
from tools.draw_schedule import main

SVG = "{http://www.w3.org/2000/svg}"
Case = tuple[str, int, int, int, tuple[float, float, float], float]
# name, ranks, microbatches, virtual stages, costs of a rank, transfer
CASES: list[Case] = [
    ("1f1b", 4, 8, 1, (1.0, 1.0, 1.0), 0.0),
    ("gpipe", 3, 5, 1, (1.0, 0.5, 0.25), 0.1),
    ("interleaved", 4, 6, 3, (1.0, 1.0, 1.0), 0.0),
    ("zero-bubble", 4, 8, 1, (1.0, 1.2, 0.8), 0.0),
    ("1f1b", 12, 64, 1, (1.0, 1.0, 1.0), 0.0),
    ("1f1b", 1, 1, 1, (1.0, 1.0, 1.0), 0.0),
]


def words(case: Case) -> list[str]:
    name, ranks, microbatches, virtual, times, transfer = case
    given = plain(name, ranks, microbatches) + (["--virtual-stages", str(virtual)] if virtual > 1 else [])
    return [*given, "--costs", ",".join(map(str, times)), "--transfer", str(transfer)]


def plain(name: str, ranks: int, microbatches: int) -> list[str]:
    return ["--schedule", name, "--pp", str(ranks), "--microbatches", str(microbatches)]


@dataclass(frozen=True)
class Drawn:
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
        note = element.find(f"{SVG}title")
        if note is not None:
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


@pytest.fixture(params=CASES, ids=str, scope="module")
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """A case and its picture."""
    path = tmp_path_factory.mktemp("drawn") / "out.svg"
    assert main([*words(request.param), "-o", str(path)]) == 0
    return request.param, path


def test_the_boxes_are_the_simulators_spans(drawn: tuple[Case, Path]) -> None:
    (name, ranks, microbatches, virtual, times, transfer), path = drawn
    schedule = build_schedule(name, ranks, microbatches, virtual)
    timeline = simulate(schedule, costs_of(schedule, times, transfer))
    for row, spans in zip(drawn_spans(path, timeline.end), timeline.spans, strict=True):
        assert list(row) == [str(span.action) for span in spans]
        for span in spans:  # places are written to a thousandth of a pixel
            assert row[str(span.action)] == pytest.approx((span.start, span.end), abs=1e-3 * timeline.end / 100)


def test_boxes_have_the_colour_of_their_kind_and_stage_and_the_number_of_their_microbatch(
    drawn: tuple[Case, Path],
) -> None:
    (name, ranks, _, virtual, *_), path = drawn
    found = [box for box in boxes(path) if box.note != "bubble"]
    fills = defaultdict(set)
    for box in found:
        if match := re.match(r"(\d+)([FBIW])\d+:", box.note):
            fills[match[2], int(match[1]) // ranks].add(box.fill)
    assert all(len(of_kind) == 1 for of_kind in fills.values())
    assert len(set.union(*fills.values())) == len(fills) == virtual * (3 if name == "zero-bubble" else 2)
    kinds = set()
    for text in ElementTree.parse(path).iter(f"{SVG}text"):
        x, y, size = (float(text.attrib[key]) for key in ("x", "y", "font-size"))
        inside = [box for box in found if box.x < x < box.x + box.width and box.y < y < box.y + box.height]
        if text.attrib.get("text-anchor") != "middle" or not inside:
            continue
        (box,) = inside
        match = re.match(r"\d+([FBIW])(\d+):", box.note)
        assert match is not None and match[2] == text.text
        assert size >= 6 and len(match[2]) * 0.55 * size < box.width  # a digit of Helvetica is 0.556 of its size
        kinds.add(match[1])
    assert {"F"} < kinds  # 12 ranks with 64 microbatches, too: the picture is then wider


def title(path: Path) -> str:
    found = ElementTree.parse(path).getroot().find(f"{SVG}title")
    assert found is not None and found.text is not None
    return found.text


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--schedule 1f1b --pp 4 --microbatches 8", "bubble 27.3% of the ranks' time = (p − 1) / (m + p − 1)"),
        ("--schedule gpipe --pp 4 --microbatches 8", "bubble 27.3% of the ranks' time = (p − 1) / (m + p − 1)"),
        (
            "--schedule interleaved --virtual-stages 2 --pp 4 --microbatches 8",
            "bubble 15.8% of the ranks' time = (p − 1) / (v m",
        ),
        ("--schedule zero-bubble --pp 4 --microbatches 8", "bubble 11.1% of the ranks' time = (p − 1)(f + b − w) / (m"),
        (
            "--schedule 1f1b --pp 2 --microbatches 1 --transfer 3",  # 3 a rank, in 6 + 2 x 3
            "bubble 75.0% of the ranks' time ((p − 1) / (m + p − 1) without transfers: 50.0%)",
        ),
        ("--schedule zero-bubble --pp 4 --microbatches 2", " of the ranks' time"),
    ],
)
def test_the_title_states_the_bubble(flags: str, said: str, tmp_path: Path) -> None:
    assert main([*flags.split(), "-o", str(tmp_path / "out.svg")]) == 0
    assert said in title(tmp_path / "out.svg")


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.9), (2.0, 1.5, 1.5), (1.0, 1.0, 1.5)], ids=str)
@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_a_closed_form_is_given_only_where_it_holds(name: str, virtual: int, times: tuple[float, float, float]) -> None:
    given = 0
    for ranks in range(1, 6):
        for microbatches in range(1, 11):
            schedule = build_schedule(name, ranks, microbatches, virtual)
            costs = costs_of(schedule, times, 0.0)
            if (form := closed_form(schedule, costs)) is not None:
                assert simulate(schedule, costs).idle_share == pytest.approx(form.value, abs=1e-9)
                given += 1
    assert given or times == (1.0, 1.0, 1.5)


# ---- in the terminal


@pytest.mark.parametrize(
    "name, ranks, microbatches, virtual", [("1f1b", 4, 8, 1), ("zero-bubble", 4, 8, 1), ("interleaved", 2, 4, 2)]
)
def test_a_terminal_shows_every_name_in_its_place(
    name: str, ranks: int, microbatches: int, virtual: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words((name, ranks, microbatches, virtual, (1.0, 1.0, 1.0), 0.0))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bubble" in lines[1]
    schedule = build_schedule(name, ranks, microbatches, virtual)
    timeline = simulate(schedule, costs_of(schedule, (1.0, 1.0, 1.0), 0.0))
    rows = [line for line in lines if line.startswith("rank ")]
    assert max(map(len, lines)) <= 80
    for rank, (row, spans) in enumerate(zip(rows, timeline.spans, strict=True)):
        shown = [(match[0], match.start()) for match in re.finditer(r"[FBIWfbiw]\d+", row[len("rank 0 ") :])]
        scale = (len(row) - len("rank 0 ")) / timeline.end
        expected = [(letter(span.action, ranks), round(span.start * scale)) for span in spans]
        assert shown == expected, rank


def letter(action: Action, ranks: int) -> str:
    name = f"{action.op.value}{action.microbatch}"
    return name.lower() if action.stage // ranks % 2 else name


def test_a_terminal_shows_what_there_is_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plain("1f1b", 12, 64)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank ")]
    assert {len(row) for row in rows} == {80}
    assert all(set(row[8:]) == {"F", "B", "·"} for row in rows[:11])
    # The first rank waits for its first gradient: 22 of 225 units of time, in 72 columns.
    assert rows[0][8:].strip("FB").count("·") == pytest.approx(22 / 225 * 72, abs=1)


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


def test_a_file_of_ones_own_is_drawn_like_the_built_in_one(tmp_path: Path) -> None:
    schedule = build_schedule("zero-bubble", 3, 4)
    rows = [",".join(map(str, schedule.computations(rank))) for rank in range(3)]
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    assert main(["--csv", str(tmp_path / "mine.csv"), "-o", str(tmp_path / "own.svg")]) == 0
    assert main([*plain("zero-bubble", 3, 4), "-o", str(tmp_path / "built.svg")]) == 0
    own, built = boxes(tmp_path / "own.svg"), boxes(tmp_path / "built.svg")
    lower = built[0].y - own[0].y  # the title of the built-in one takes more lines
    assert [replace(box, y=box.y + lower) for box in own] == built
    assert title(tmp_path / "own.svg").startswith("mine.csv: 3 ranks, 4 microbatches: bubble ")


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


def test_every_picture_of_the_documentation_has_its_command_and_its_place() -> None:
    pictures = sorted(path.name for path in (ROOT / "docs/pictures").iterdir() if path.name != "trace.svg")
    assert sorted(command.split("/")[-1] for command in COMMANDS) == pictures
    text = (ROOT / "docs/explain/schedules.md").read_text()
    assert all(f"](../pictures/{name})" in text for name in [*pictures, "trace.svg"])


# ---- refusals

PLAIN = "--schedule 1f1b --pp 2 --microbatches 4"


@pytest.mark.parametrize("output", [[], ["-o", "out.svg"]], ids=str)
@pytest.mark.parametrize("flags", ["--costs 1e6,1e-6,1e6", "--costs 1e-6,1e-6,1e-6 --transfer 1e6", "--transfer 1e6"])
def test_times_at_the_bounds_are_drawn(
    flags: str, output: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*PLAIN.split(), *flags.split(), *output]) == 0


def test_png_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megacore.drawing.canvas.importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main([*PLAIN.split(), "-o", "out.png"]) == 2
    assert "-o out.png needs matplotlib, which is not installed: use -o out.svg, or" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    flags = ("--schedule", "--csv", "--from-trace", "--pp", "--microbatches", "--virtual-stages", "--costs")
    assert all(flag in said for flag in (*flags, "--transfer", "--step", "--output"))
