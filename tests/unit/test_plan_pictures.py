"""Pictures of tools/plan.py: the time line, memory over time and the frontier of a search."""

from __future__ import annotations

import dataclasses
import errno
import html
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from megacore.drawing import canvas
from megacore.drawing.canvas import Box, Drawing, Words
from megacore.drawing.timelines import Scale, axis
from megacore.errors import UserError
from megacore.plan.cluster import CLUSTERS
from megacore.plan.memory import GIB
from megacore.plan.plan_picture import frontier_picture
from megacore.plan.planner import make_plan, scheduled
from megacore.plan.search import Found, Layout
from megacore.plan.stage_time import speed_of
from megacore.plan.step_time import pipeline_costs, timeline
from tests.parity.runs import make_config
from tests.unit.planning import BLOOM, planned, resolved
from tools.plan import main

ROOT = Path(__file__).parents[2]


def test_the_picture_of_a_search_shows_its_list_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "found.svg"
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 32 --cluster a100-40g --world-size 8"
    found = planned(capsys, f"{flags} --search --max-tp 2 --max-micro-batch-size 1 --picture {picture}")
    text = picture.read_text(encoding="utf-8")
    width = float(re.search(r'width="([0-9.]+)"', text).group(1))  # type: ignore[union-attr]
    assert width == 74 + 820 + 30  # no wider than the axes, whatever is listed
    listed = [html.unescape(line) for line in re.findall(r'font-size="11.5"[^>]*>([^<]*)</text>', text)]
    assert max(map(len, listed)) * 6.3 < 820  # of DejaVu Sans at 11.5, as measured in a PNG
    words = " ".join(listed).split()
    assert all(set(row["flags"].split()) <= set(words) for row in found["frontier"][:12])
    assert " ".join(words).count("--tp ") == len(found["frontier"][:12])


@pytest.mark.parametrize(
    ("flags", "pictures"),
    [("", ("timeline", "memory-timeline")), ("--world-size 2 --search --max-micro-batch-size 1", ("picture",))],
)
def test_pictures_are_drawn_although_nobody_reads_the_report(
    flags: str, pictures: tuple[str, ...], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.svg" for name in pictures]
    given = [word for name, path in zip(pictures, paths, strict=True) for word in (f"--{name}", str(path))]
    command = [sys.executable, "tools/plan.py", "pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", "h100"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [*command, "--global-batch-size", "2", *flags.split(), *given]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        streams: dict[str, Any] = {"stdout": writer, "stderr": subprocess.PIPE, "cwd": ROOT, "env": environment}
        done = subprocess.run(words, check=False, **streams)
        assert (done.returncode, [path.is_file() for path in paths]) == (141, [True] * len(paths)), done.stderr
        small_files = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *words]
        done = subprocess.run(small_files, check=False, **streams)
        assert (done.returncode, done.stderr.count(b": File too large; ")) == (2, len(paths)), done.stderr
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
    assert main(words) == 0
    expected = json.loads(capsys.readouterr().out)
    given = [word for name, path in zip(pictures, paths, strict=True) for word in (f"--{name}", str(path))]
    with mock.patch.object(canvas, "to_svg", side_effect=[error, "<svg/>"]):
        assert main([*words, *given]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out).keys() == expected.keys()
    said = "it has no size" if isinstance(error, UserError) else f"{paths[0]}: No space left on device; make room"
    assert said in err
    assert [path.is_file() for path in paths[1:]] == [True] * (len(paths) - 1)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_that_fails_while_it_is_written_leaves_the_file_as_it_was(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    drawing = canvas.Drawing(title="a title", width=100, height=100)
    canvas.save(drawing, path)
    before = path.read_bytes()

    def half(drawing: canvas.Drawing, file: BinaryIO) -> None:
        file.write(b"half")
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(canvas, f"_write_{suffix}", half), pytest.raises(OSError, match="No space") as error:
        canvas.save(drawing, path)
    assert error.value.filename == str(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_picture_replaces_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    canvas.save(canvas.Drawing(title="a title", width=100, height=100), tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink() and "a title" in (tmp_path / "real.svg").read_text(encoding="utf-8")


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


def texts_of(drawing: Drawing) -> list[str]:
    return [mark.text for mark in drawing.marks if isinstance(mark, Words)]


def numbers_of(drawing: Drawing) -> list[Words]:
    """The numbers beside points of the frontier."""
    return [mark for mark in drawing.marks if isinstance(mark, Words) and mark.color == "#c2410c"]


@pytest.mark.parametrize(("time", "size"), [(1.01, 0.4), (1.09, 0.06), (1.008, 0.06), (1.07, 0.8)])
def test_numbers_of_a_frontier_cover_no_point_and_stay_beside_theirs(time: float, size: float) -> None:
    """Flat, steep, crowded and long frontiers, whose points lie on each other or far apart."""
    drawing = frontier_picture(found_of([(time**n, 9.9 - size * n) for n in range(12)]))
    points = [mark for mark in drawing.marks if isinstance(mark, Box) and mark.width == 8]
    numbers = numbers_of(drawing)
    assert [word.text for word in numbers] == [str(n) for n in range(1, 13)]
    places = [(word.x, word.y, 3.5 * len(word.text)) for word in numbers]
    for i, (x, y, half) in enumerate(places):
        assert math.dist((x, y), (points[i].x + 4, points[i].y + 4)) < 75
        assert x - half > 74 and y < 496  # inside the axes
        for point in points:
            assert abs(x - point.x - 4) > half + 4 or abs(y - point.y - 4) > 9
        for a, b, other in places[:i]:
            assert abs(x - a) > half + other or abs(y - b) > 10


def test_the_picture_of_a_search_says_what_it_leaves_out() -> None:
    many = found_of([(1.05**n, 9 - 0.4 * n) for n in range(15)] + [(5000.0, 9.5)] * 1200)
    drawing = frontier_picture(many)
    texts = texts_of(drawing)
    assert "1,215 layouts that fit into 10.0 GiB of h100" in texts
    assert any("red: the frontier of 15 layouts, the 12 fastest with a number" in text for text in texts)
    assert any("not drawn: 1,200 that take more than 4 times the fastest" in text for text in texts)
    assert len(numbers_of(drawing)) == 12
    assert len([mark for mark in drawing.marks if isinstance(mark, Box) and mark.width == 8]) == 15
    slow = frontier_picture(found_of([(1.2**n, 9 - 0.4 * n) for n in range(15)]))  # the last seven above the axis
    texts = texts_of(slow)
    assert any("red: the frontier of 15 layouts, the 8 fastest with a number" in text for text in texts)
    assert len(numbers_of(slow)) == 8
    few = texts_of(frontier_picture(found_of([(1.0, 9.0), (1.2, 5.0)])))
    assert "step time by memory per rank; red: the frontier" in few
    assert not any("not drawn" in text or "of 2 layouts" in text for text in few)


def test_a_frontier_has_no_two_layouts_that_are_alike() -> None:
    """And the axes of its picture have round numbers, also for a single layout."""
    sizes = [(1.0, 9.0), (1.002, 8.0), (1.004, 6.0), (1.006, 5.99), (1.2, 5.0), (1.2, 7.0), (1.3, 4.99), (2.0, 3.0)]
    found = found_of(sizes)
    assert [layout.seconds for layout in found.frontier] == [1.004, 1.2, 2.0]
    texts = texts_of(frontier_picture(found))
    assert [text for text in texts if re.fullmatch(r"[0-9.]+", text)][:-6] == ["0", "2", "4", "6", "8"]
    assert [text for text in texts if re.fullmatch(r"[0-9.]+ s", text)] == [f"{n / 5:.1f} s" for n in range(5, 11)]
    one = dataclasses.replace(found, layouts=found.layouts[:1])
    texts = texts_of(frontier_picture(one))
    assert [text for text in texts if text.endswith(" s")] == [f"{n / 10:.1f} s" for n in range(10, 16)]


def drawn(flags: str, path: Path, kind: str = "timeline") -> str:
    """The picture of this kind that tools/plan.py draws."""
    assert main([*flags.split(), f"--{kind}", str(path)]) == 0
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Both pictures of BLOOM's step."""
    folder = tmp_path_factory.mktemp("bloom")
    line = drawn(f"{BLOOM} --memory-timeline {folder}/memory.svg", folder / "line.svg")
    return {"line": line, "memory": (folder / "memory.svg").read_text(encoding="utf-8")}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved --virtual-stages 5"])
def test_a_long_time_line_has_a_break_in_what_repeats(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is drawn has the times and the numbers of the whole step."""
    path = tmp_path / "line.svg"
    flags = (
        "--preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 4608 --micro-batch-size 2 --zero-stage 1 "
        f"--precision bf16 --schedule {schedule}"
    )
    plan = planned(capsys, f"pretrain_gpt.py {flags} --cluster a100-80g --timeline {path}")
    text = path.read_text(encoding="utf-8")
    assert "12 ranks, a100-80g: 288 microbatches" in text
    found = re.search("step [0-9.]+ s, bubble of the busiest rank ([0-9.]+)% of it; .*; ([0-9]+) of 288 micro", text)
    assert found is not None
    whole, left_out = float(found.group(1)), int(found.group(2))
    assert whole / 100 == pytest.approx(plan["step_parts"]["bubble"]["value"] / plan["step_seconds"]["value"], abs=1e-3)
    cluster = CLUSTERS["a100-80g"]
    same = make_plan(scheduled(resolved(f"{flags} --mock-data --train-iters 10"), cluster), cluster)
    costs = pipeline_costs(same.config, same.time.stages, speed_of(same.config, cluster, "expected"))
    line = timeline(same.config, costs.times(1e3), 288)
    spans = {str(span.action): (span.start, span.end) for spans in line.spans for span in spans}
    drawn = re.findall(r"<title>([0-9]+[FBIW][0-9]+): .* from ([0-9.e+]+) to ([0-9.e+]+)</title>", text)
    assert {name for name, *_ in drawn} <= spans.keys()
    assert len(drawn) >= len(spans) * (288 - left_out) / 288  # those at the break are there twice
    for name, start, end in drawn:
        assert (float(start), float(end)) == pytest.approx(spans[name], abs=0.01 * line.end * (288 - left_out) / 288)
    ticks = [float(tick) for tick in re.findall(r'font-size="11"[^>]*text-anchor="middle">([0-9.]+)</text>', text)]
    assert ticks == sorted(ticks) and ticks[-1] > 0.95 * line.end / 1e3


@pytest.mark.parametrize(("microbatches", "left_out"), [(32, 16), (16, 0), (8, 0)])
def test_an_interleaved_time_line_has_a_break_where_its_stages_repeat_late(
    microbatches: int, left_out: int, tmp_path: Path
) -> None:
    """Thin stages of unequal sizes repeat after four rounds of microbatches only."""
    flags = (
        "pretrain_gpt.py --preset llama-3-8b --tp 2 --pp 4 --dp 8 --zero-stage 1 --micro-batch-size 1 --cluster h100"
    )
    more = f"--global-batch-size {8 * microbatches} --schedule interleaved --virtual-stages 3"
    text = drawn(f"{flags} {more}", tmp_path / "line.svg")
    assert f"4 ranks, h100: {microbatches} microbatches<" in text
    assert (f"{left_out} of {microbatches} microbatches left out at the break<" in text) is (left_out > 0)


def test_a_time_line_in_which_nothing_repeats_says_that_it_has_fewer_microbatches_and_which_bubble_is_whose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "line.svg"
    plan = planned(capsys, f"{BLOOM.replace('1f1b', 'gpipe')} --timeline {path}")
    text = path.read_text(encoding="utf-8")
    assert "gpipe, 12 ranks, a100-80g: a step with 24 microbatches in place of 128" in text
    bubble = "bubble of the busiest rank ([0-9.]+)%"
    found = re.search(f"{bubble} of what is drawn; with 128 microbatches: step [0-9.]+ s, {bubble} of it", text)
    assert found is not None
    drawn, whole = map(float, found.groups())
    assert whole / 100 == pytest.approx(plan["step_parts"]["bubble"]["value"] / plan["step_seconds"]["value"], abs=1e-3)
    assert 25 < drawn < 33  # of equal stages (p - 1) / (m + p - 1) = 31 %
    assert whole < 10


def test_the_time_line_of_one_pipeline_rank_has_no_schedule_no_bubble_and_no_transfers(tmp_path: Path) -> None:
    flags, path = "pretrain_gpt.py --preset gpt2-small --cluster h100", tmp_path / "line.svg"
    text = drawn(flags, path)
    assert "predicted: one pipeline rank, h100: 1 microbatch<" in text
    assert "auto" not in text and "transfer" not in text and ">bubble</text>" not in text
    text = drawn(f"{flags} --micro-batch-size 1 --global-batch-size 2048", path)
    assert "one pipeline rank, h100: 2,048 microbatches<" in text
    assert re.search(r">step [0-9.]+ s; 2,040 of 2,048 microbatches left out at the break<", text)
    text = drawn("pretrain_gpt.py --preset llama-3-8b --pp 4 --global-batch-size 256 --cluster laptop", path)
    assert re.search(r">step [0-9]{3},[0-9]{3} s, bubble", text)


def test_pictures_are_no_wider_than_what_they_show(bloom: dict[str, str]) -> None:
    assert "transfer" in bloom["line"] and bloom["memory"].count("peak ") == 12
    for name, beside in (("line", 22), ("memory", 120)):
        width = float(re.search(r'width="([0-9.]+)"', bloom[name]).group(1))  # type: ignore[union-attr]
        found = re.findall(r'<rect x="([0-9.]+)" y="[0-9.]+" width="([0-9.]+)"', bloom[name])
        assert max(float(x) + float(wide) for x, wide in found) == pytest.approx(width - beside, abs=0.01)
        assert width < 2490


@pytest.mark.parametrize(
    ("end", "unit", "labels"),
    [
        (12.0, "ms", ["0", "2", "4", "6", "8", "10", "12", "ms"]),
        (6000.0, "ms", ["0", "1,000", "2,000", "3,000", "4,000", "5,000", "6,000", "ms"]),
        (30_000.0, "ms", ["0", "5", "10", "15", "20", "25", "30", "s"]),
        (3000.0, "F", ["0", "500", "1,000", "1,500", "2,000", "2,500", "3,000", "F"]),
    ],
)
def test_long_time_axes_are_in_seconds(end: float, unit: str, labels: list[str]) -> None:
    drawing = Drawing(title="", width=100, height=100)
    axis(drawing, 0.0, Scale(end, 1.0), unit=unit)
    assert texts_of(drawing) == labels


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved --virtual-stages 2", "zero-bubble"])
def test_every_box_of_a_time_line_has_its_number_and_no_transfer_crosses_one(schedule: str, tmp_path: Path) -> None:
    lines = drawn(BLOOM.replace("--schedule 1f1b", f"--schedule {schedule}"), tmp_path / "line.svg").splitlines()
    widths = {
        number: float(found.group(1))
        for number, line in enumerate(lines)
        if (found := re.search(r'width="([0-9.]+)".*of microbatch', line))
    }
    boxes = [number for number, width in widths.items() if width > 13]  # others are cut off at the break
    dark = (line for line in lines if "#6b7280" not in line)
    numbers = [line for line in dark if re.search(r'text-anchor="middle">[0-9]+</text>', line)]
    transfers = [number for number, line in enumerate(lines) if line.startswith("<line") and "#c2410c" in line]
    assert len(boxes) <= len(numbers) <= len(widths)
    assert len(boxes) > 400
    assert len(transfers) > 300
    assert max(transfers[:-1]) < min(boxes)  # the last is that of the legend


def test_activations_that_are_few_beside_the_state_are_drawn_by_a_scale_of_their_own(bloom: dict[str, str]) -> None:
    assert "the dark strip is not to scale; above the strip, the full row height is" in bloom["memory"]
    heights = heights_of(bloom["memory"])
    assert max(heights) == pytest.approx(36, abs=0.5)  # of a row of 46 pixels
    assert sum(height > 4 for height in heights) > 0.9 * len(heights)


def heights_of(text: str) -> list[float]:
    """Of the boxes that show activations."""
    return [float(found) for found in re.findall(r'height="([0-9.]+)" fill="#9db7d9"', text)]


def test_activations_are_kept_until_the_gradients_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a zero-bubble schedule for as many microbatches on every rank; the picture shows the peak."""
    flags = "pretrain_gpt.py --preset gpt2-large --tp 2 --pp 4 --dp 2 --global-batch-size 64 --cluster h100"
    picture = tmp_path / "memory.svg"
    whole = planned(capsys, f"{flags} --schedule 1f1b")["memory"]
    split = planned(capsys, f"{flags} --schedule zero-bubble --memory-timeline {picture}")["memory"]
    assert split[-1]["bytes"]["activations"] > 4 * whole[-1]["bytes"]["activations"]  # with gradients of outputs
    assert split[0]["bytes"]["activations"] > whole[0]["bytes"]["activations"]
    text = picture.read_text(encoding="utf-8")
    assert "the full row height is" in text  # a twentieth of the device's memory would be a line
    drawn = re.findall(r"4 microbatches: ([0-9.]+) GiB", text)
    fullest = max(rank["peak"]["value"] for rank in split) / GIB
    assert max(map(float, drawn)) == pytest.approx(fullest, rel=0.02)


GPIPE = "pretrain_gpt.py --preset gpt2-small --pp 4 --dp 1 --schedule gpipe --cluster h100 --global-batch-size"


def test_the_memory_of_a_step_with_fewer_microbatches_is_that_of_what_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ramp to the peak of the microbatches that are drawn; the peak of the whole step is in the notes."""
    path, short = tmp_path / "memory.svg", tmp_path / "short.svg"
    whole = planned(capsys, f"{GPIPE} 64 --memory-timeline {path}")["memory"]
    drawn = planned(capsys, f"{GPIPE} 8 --memory-timeline {short}")["memory"]
    text = path.read_text(encoding="utf-8")
    peak = max(rank["peak"]["value"] for rank in whole) / GIB
    note = f"a step with 8 microbatches in place of 64; the peak grows with the microbatches: {peak:.1f} GiB with 64; "
    assert note in text
    peaks = [float(found) for found in re.findall("peak ([0-9.]+) GiB", text)]
    assert peaks == [round(rank["peak"]["value"] / GIB, 1) for rank in drawn]
    heights, of_short = heights_of(text), short.read_text(encoding="utf-8")
    assert min(heights) < max(heights) / 6
    assert "grows" not in of_short and heights == heights_of(of_short)


def test_many_ranks_that_take_the_same_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the table of the report."""
    path = tmp_path / "memory.svg"
    flags = f"{GPIPE.replace('--pp 4', '--pp 20')} 32 --num-layers 20 --memory-timeline {path}"
    memory = planned(capsys, flags)["memory"]
    text = path.read_text(encoding="utf-8")
    names = re.findall(r'text-anchor="end">((?:rank )?[0-9]+(?: to [0-9]+)?)</text>', text)
    assert names == ["rank 0", "1 to 18", "rank 19"]
    assert text.count(">peak ") == 3 and "a row of several ranks has the times of the first one" in text
    assert len(memory) == 20
    few = f"{GPIPE} 8 --memory-timeline {path}"
    planned(capsys, few)
    assert path.read_text(encoding="utf-8").count(">peak ") == 4
