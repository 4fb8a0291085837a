"""What the compiler makes of every kernel for GPUs that are not here: no spills, whole vectors, known sizes.

Expectations are recorded per Triton version (`python -m tests.kernels.test_compiled` writes those of the installed
one); an unrecorded version is held to everything but the numbers. Registers may differ by a few from what is recorded:
what ptxas is given depends a little on what the process compiled before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.unit.packaging_builds import ROOT

RECORDS = Path(__file__).parent / "figures"
REGISTERS_EITHER_WAY = 8
FIGURES = ("registers", "shared", "wide", "narrow")


def report(*arguments: str, cwd: Path = ROOT) -> dict[str, Any]:
    """Compile in a process of its own: pretending to have a GPU lasts as long as the process."""
    command = [sys.executable, "tools/kernel_report.py", "--json", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def record() -> Path:
    return RECORDS / f"triton-{triton.__version__}.json"


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return report()


def test_no_kernel_spills_or_moves_rows_in_pieces(compiled: dict[str, Any]) -> None:
    assert len(compiled["compiled"]) > 150
    assert {c["architecture"] for c in compiled["compiled"]} == {80, 90}
    assert not compiled["problems"], "\n".join(compiled["problems"])


def test_figures_are_the_recorded_ones(compiled: dict[str, Any]) -> None:
    if not record().exists():
        pytest.skip(f"nothing is recorded for Triton {triton.__version__}")
    expected: dict[str, list[int]] = json.loads(record().read_text())
    found = {c["name"]: [c[figure] for figure in FIGURES] for c in compiled["compiled"]}
    assert found.keys() == expected.keys()
    for name, (registers, *others) in found.items():
        assert abs(registers - expected[name][0]) <= REGISTERS_EITHER_WAY, f"{name}: {registers} registers"
        assert others == expected[name][1:], name


def test_the_page_has_a_row_for_every_kernel(compiled: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.splitlines() if line.startswith("|")}
    missing = {(c["case"], c["kernel"]) for c in compiled["compiled"]} - rows
    assert not missing, "python tools/kernel_report.py --write docs/kernels.md"


if __name__ == "__main__":
    RECORDS.mkdir(exist_ok=True)
    figures = {c["name"]: [c[figure] for figure in FIGURES] for c in report()["compiled"]}
    lines = ",\n".join(f"{json.dumps(name)}: {values}" for name, values in figures.items())
    record().write_text(f"{{\n{lines}\n}}\n")
