"""The example and the manual's script run as they stand, and the example prints the same on every layout."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import warnings
from pathlib import Path

import pytest

from tests.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pipeline_any_model.py"
MANUAL = ROOT / "docs" / "guides" / "any-model.md"


def run_script(rank: int, world_size: int, path: str) -> str:
    """What a script prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_the_example_learns_and_prints_the_same_on_four_processes() -> None:
    (alone,) = run_distributed(run_script, 1, str(EXAMPLE), init=False, timeout=120)
    lines = re.findall(r"step +(\d+) \| loss ([\d.]+) \| accuracy ([\d.]+)%", alone)
    losses = [float(loss) for _, loss, _ in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]
    assert float(lines[-1][2]) > 95.0
    assert run_distributed(run_script, 4, str(EXAMPLE), init=False, timeout=120) == [alone, "", "", ""]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_manuals_script_runs(processes: int, tmp_path: Path) -> None:
    (script,) = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", MANUAL.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(script, encoding="utf-8")
    assert len([line for line in script.splitlines() if line.strip()]) <= 35
    printed = [text for size in (1, processes) for text in run_distributed(run_script, size, str(path), init=False)]
    losses = [[float(found) for found in re.findall(r"[\d.]*\d", text)] for text in printed]
    assert max(losses[0]) < 0.2
    assert min(losses[0]) > 0.01, "four decimals show too little of a smaller one to compare"
    for found in losses:
        assert found == pytest.approx(losses[0], rel=0.02), "50 steps amplify rounding, but not to more"
