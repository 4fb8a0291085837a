"""Pictures of tools/plan.py: the time line, memory over time and the frontier of a search."""

from __future__ import annotations

import dataclasses
import errno
import json
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
from megacore.drawing.canvas import Drawing, Words
from megacore.errors import UserError
from megacore.plan.cluster import CLUSTERS
from megacore.plan.memory import GIB
from megacore.plan.plan_picture import frontier_picture
from megacore.plan.planner import make_plan, scheduled
from megacore.plan.search import Found, Layout
from megacore.plan.stage_time import speed_of
from megacore.plan.step_time import pipeline_costs, timeline
from tests.parity.runs import make_config
from tests.unit.planning import planned, resolved
from tools.plan import main

ROOT = Path(__file__).parents[2]


def test_pictures_are_drawn_although_nobody_reads_the_report(tmp_path: Path) -> None:
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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc refuses new files to root too")
def test_pictures_that_cannot_be_written_are_refused_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.svg"
    os.mkfifo(pipe)
    flags = f"pretrain_gpt.py --preset gpt2-small --cluster moon --timeline {pipe} --memory-timeline /proc/m.svg"
    assert main(flags.split()) == 2
    out, text = capsys.readouterr()
    assert not out
    for part in (
        "3 problems",
        "--cluster moon",
        f"--timeline {pipe} is not a regular file",
        "--memory-timeline /proc/m.svg cannot be written: /proc takes no new files",
    ):
        assert part in text


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


@pytest.mark.parametrize(
    "schedule", ["zero-bubble", pytest.param("interleaved --virtual-stages 5", marks=pytest.mark.slow)]
)
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
