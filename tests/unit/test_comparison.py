"""benchmarks/compare.py without a framework: layouts, the search for the largest model, the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import next_layers
from benchmarks.comparison.job import KINDS, ONE, Layout, Sizes
from benchmarks.comparison.results import Largest, Results, Row, markdown, replace_section

ROOT = Path(__file__).resolve().parents[2]
TINY = Sizes(layers=4, hidden=16, heads=2, seq=8, vocab=100, batch=8)


def row(side: str, layout: Layout, seconds: list[float], losses: list[float]) -> Row:
    return Row(
        side=side, implementation=f"{side}: it", layout=layout, seconds=seconds, limit=1e9, peak=3 << 20,
        process_peak=9 << 20, losses=losses,
    )  # fmt: skip


@pytest.fixture
def results() -> Results:
    """Two frameworks on one process and on two ranks; the rounds of the second are twice as slow."""
    found = Results(date="2026-01-02", machine="2 CPU cores", versions={"torch": "2"}, sizes=TINY)
    for layout in (ONE, KINDS["dp"](2)):
        found.rows.append(row("megacore", layout, [0.5, 1.0, 1.5], [4.0, 3.0]))
        found.rows.append(row("torch", layout, [1.0, 2.0, 3.0], [4.0, 3.0]))
    found.largest_sizes, found.limit_bytes = TINY, 1 << 30
    found.largest.append(Largest(side="torch", layout=KINDS["dp"](2), layers=7, parameters=5_000_000, peak=1 << 29))
    found.missing["deepspeed"] = "not installed"
    return found


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize(("base", "each", "limit"), [(100, 10, 205), (100, 10, 130), (0, 7, 700), (50, 100, 320)])
def test_the_largest_model_is_found(base: int, each: int, limit: int, unit: int) -> None:
    """Against trying every number of layers."""
    peaks: dict[int, int] = {}
    layers: int | None = 2
    while layers is not None:
        assert layers not in peaks and layers % unit == 0 and len(peaks) < 6
        peaks[layers] = base + each * layers
        layers = next_layers(peaks, limit, unit)
    fitting = [count for count in range(unit, 200, unit) if base + each * count <= limit]
    assert max(count for count, peak in peaks.items() if peak <= limit) == max(fitting)


def test_the_page_has_ratios_of_rounds_and_names_what_is_missing(results: Results, tmp_path: Path) -> None:
    text = markdown(results)
    for said in ("| data parallel | 2 | 64 | 2.00 |", "5M (7)", "- deepspeed: not installed"):
        assert said in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- written by benchmarks/compare.py: begin -->\nold\n<!-- end -->\nb\n", encoding="utf-8")
    replace_section(page, text)
    assert page.read_text(encoding="utf-8").startswith("a\n<!-- written")
    assert "old" not in page.read_text(encoding="utf-8")


def test_losses_that_differ_are_named(results: Results) -> None:
    assert not list(results.disagreements())
    results.rows.append(row("megatron-core", ONE, [1.0], [4.0, 3.01]))
    ((found, apart),) = results.disagreements()
    assert found.side == "megatron-core" and apart == pytest.approx(0.01 / 3)


@pytest.mark.parametrize("program", ["compare.py", "many_ranks.py"])
def test_wrong_flags_are_refused_before_torch_is_loaded(program: str) -> None:
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['{program}', '--steps', '0']\n"
    code += f"runpy.run_path('benchmarks/{program}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count(f"{program}: error: ")) == (2, 1), done.stderr
