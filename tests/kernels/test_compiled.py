"""What the compiler makes of every kernel for GPUs that are not here: no spills, whole vectors, known sizes.

Expectations are recorded per Triton version (`python -m tests.kernels.test_compiled` writes those of the installed
one); an unrecorded version is held to everything but the numbers. Registers may differ by a few from what is recorded:
what ptxas is given depends a little on what the process compiled before.

By default one shape of each kernel and of each way it has for wide rows is compiled, for sm_90. `slow` compiles all
common shapes, for sm_80 too, and the product of widths, sequences and vocabulary shards.

Triton caches what it compiled, by source, target and its own version: only the first run on a machine takes long.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.unit.packaging_builds import ROOT
from tools.kernel_report import main

RECORDS = Path(__file__).parent / "figures"
REGISTERS_EITHER_WAY = 8
FIGURES = ("registers", "shared", "wide", "narrow")
# Kernels whose registers leave room for fewer than 32 warps of a processor: rows too wide for the rest, all heads of a
# token at once, and the optimizer's six tensors.
FEW_WARPS = {
    "forward_wide": 16, "backward_chunked": 16, "backward_wide": 16, "backward_columns": 28, "split": 16, "join": 16,
}  # fmt: skip
# In the names of the cases that are compiled by default.
USUAL = (
    *("norm 8192 bf16", "layer_norm 12288 bf16", "layer_norm 65536 bf16", "add_layer_norm 2049 fp32"),
    *("softmax causal 4096 bf16", "softmax causal, window 1024 131072", "entropy 50257 of 50304, smoothing bf16"),
    *("entropy over 8 ranks", "gelu 4096 bf16", "rotary 32 x 128 bf16", "swiglu 8192 bf16", "dropout_add 4096 bf16"),
    *("adamw", "attention 64 alibi bf16", "attention 128 documents", "grouped_linear 8 x 4096"),
    *("rows of 2 experts 4096 bf16", "states_between_chunks 64 by matrices"),
)
DEFECTS = tomllib.loads(Path(__file__).with_name("defects.toml").read_text(encoding="utf-8"))


def report(*arguments: str, cwd: Path = ROOT) -> dict[str, Any]:
    """Compile in a process of its own: pretending to have a GPU lasts as long as the process."""
    command = [sys.executable, "tools/kernel_report.py", "--json", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def only(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def record() -> Path:
    return RECORDS / f"triton-{triton.__version__}.json"


@pytest.fixture(
    scope="module",
    params=[(90, USUAL), *(pytest.param((sm, ()), marks=pytest.mark.slow) for sm in (90, 80))],
    ids=["usual", "sm_90", "sm_80"],
)
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    architecture, names = request.param
    found = report("--architecture", str(architecture), *only(names))
    assert len(found["compiled"]) > (50 if names else 150)
    assert {c["architecture"] for c in found["compiled"]} == {architecture}
    return found


def test_no_kernel_spills_or_moves_rows_in_pieces(compiled: dict[str, Any]) -> None:
    assert not compiled["problems"], "\n".join(compiled["problems"])


def test_a_name_that_no_case_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "rms_norm 4096", "--only", "no_kernel"])
    said = capsys.readouterr()
    assert stop.value.code == 2 and not said.out
    assert "--only no_kernel: no case" in said.err and "add_rms_norm" in said.err


def check_occupancy(kernels: list[dict[str, Any]]) -> None:
    """Warps enough to hide the latency of memory, and copies that need none, where rows are aligned."""
    assert any(c["kernel"] == "backward_chunked" for c in kernels)
    for c in kernels:
        if c["allowed"] >= 0:
            assert c["warps_per_sm"] >= FEW_WARPS.get(c["kernel"], 32), f"{c['name']}: {c['warps_per_sm']} warps per SM"
            if (c["case"].split()[0][-5:], c["kernel"]) in {("_norm", "backward"), ("tropy", "forward")}:
                assert c["asynchronous"], f"{c['name']} waits for its loads"


def test_loads_overlap_with_computation(compiled: dict[str, Any]) -> None:
    check_occupancy(compiled["compiled"])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [90, 80])
def test_the_product_of_shapes(architecture: int) -> None:
    """Widths 2,048 to 16,384, sequences of 2k to 32k, vocabulary shards of 16k to 128k."""
    found = report("--architecture", str(architecture), "--shapes", "product")
    assert len(found["compiled"]) > 150
    assert not found["problems"], "\n".join(found["problems"])
    assert all(c["minimum"] for c in found["compiled"]), "the bytes that a kernel must move are stated for each"
    check_occupancy(found["compiled"])


def test_figures_are_the_recorded_ones(request: pytest.FixtureRequest, compiled: dict[str, Any]) -> None:
    if not record().exists():
        pytest.skip(f"nothing is recorded for Triton {triton.__version__}")
    recorded: dict[str, list[int]] = json.loads(record().read_text())
    found = {c["name"]: [c[figure] for figure in FIGURES] for c in compiled["compiled"]}
    architecture = compiled["compiled"][0]["architecture"]
    expected = {name: figures for name, figures in recorded.items() if name.endswith(f", sm_{architecture}")}
    assert found.keys() <= expected.keys()
    assert len(found) == len(expected) or "usual" in request.node.name
    for name, (registers, *others) in found.items():
        assert abs(registers - expected[name][0]) <= REGISTERS_EITHER_WAY, f"{name}: {registers} registers"
        assert others == expected[name][1:], name


def test_the_page_names_every_operator(compiled: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "explain" / "kernels.md").read_text(encoding="utf-8")
    assert not {c["case"].split()[0].rstrip(",") for c in compiled["compiled"]} - set(re.findall(r"\w+[a-z]", page))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on a copy of the kernels with every defect, for both architectures."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("kernels", "megacore", "tools"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for defect in DEFECTS.values():
        file = tree / "kernels" / f"{defect['kernel']}.py"
        text = file.read_text(encoding="utf-8")
        assert defect["old"] in text, f"{file.name} has changed: plant the defect anew"
        file.write_text(text.replace(defect["old"], defect["new"]), encoding="utf-8")
    return report(*only([one["case"] for one in DEFECTS.values()]), cwd=tree)


@pytest.mark.parametrize("defect", DEFECTS)
def test_bad_code_is_found(defect: str, planted: dict[str, Any]) -> None:
    case, message = DEFECTS[defect]["case"], DEFECTS[defect]["report"]
    problems = [problem for problem in planted["problems"] if case in problem and "sm_90" in problem]
    assert problems and all(message in problem for problem in problems), problems


def test_each_architecture_is_compiled_for_itself(planted: dict[str, Any]) -> None:
    """Triton keeps what it compiled per device: one device for all would give the code of the first architecture."""
    found = [c["architecture"] for c in planted["compiled"] if "gelu 4096 bf16" in c["case"]]
    assert sorted(found) == [80] * 4 + [90] * 4  # gelu and bias_gelu, both ways


if __name__ == "__main__":
    RECORDS.mkdir(exist_ok=True)
    figures = {c["name"]: [c[figure] for figure in FIGURES] for c in report()["compiled"]}
    lines = ",\n".join(f"{json.dumps(name)}: {values}" for name, values in figures.items())
    record().write_text(f"{{\n{lines}\n}}\n")
