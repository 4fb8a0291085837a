"""The tests of the kernels find what they are there to find: each defect, planted in a copy of the tree, fails them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.test_compiled import report
from tests.kernels.test_interpreter import interpreted, pytestmark
from tests.unit.packaging_builds import ROOT

__all__ = ["pytestmark"]

NUMERICS = {
    "no causal mask": (
        "softmax",
        '    if MASKED:\n        x = tl.where((columns >= first) & (columns < last), x, float("-inf"))\n',
        "",
        "fused_softmax-causal-13x13-fp32",
    ),
    "no maximum subtracted from scores": (
        "softmax",
        "tl.exp(x - peak)\n    total",
        "tl.exp(x)\n    total",
        "large_scores",
    ),
    "no maximum subtracted from logits": (
        "cross_entropy",
        "higher = tl.maximum(peak, tl.max(x, 0))",
        "higher = tl.max(x, 0) * 0.0",
        "shifted_logits",
    ),
    "a bf16 load that is not widened": (
        "norm",
        "    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    if HAS_RESIDUAL:",
        "    x = tl.load(x_ptr + at, mask=inside, other=0.0)\n    if HAS_RESIDUAL:",
        "layer_norm-33x100-bf16",
    ),
    "the last row of a share left out": (
        "norm",
        "range(program, rows, tl.num_programs(0))",
        "range(program, rows - 1, tl.num_programs(0))",
        "layer_norm-33x100-fp32",
    ),
    "another mask in backward": (
        "dropout",
        "    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    kept = _kept(seed,",
        "    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    kept = _kept(seed + 1,",
        "bias_dropout_add-5x100-True-fp32",
    ),
}
COMPILED = {
    "the exact causal condition in the load's mask": (
        "softmax",
        "touched &= columns // 16 * 16 < last",
        "touched &= columns < last",
        "fused_softmax causal 4096 bf16",
        "of less than 128 bits",
    ),
    "the exact vocabulary in the load's mask": (
        "cross_entropy",
        'mask=column < width, other=float("-inf")',
        'mask=column < columns, other=float("-inf")',
        "cross_entropy 50257 of 50304 bf16",
        "of less than 128 bits",
    ),
    "a block that does not fit the registers": (
        "norm",
        "PERSISTENT = {True: 8192",
        "PERSISTENT = {True: 32768",
        "layer_norm 16384 bf16",
        "spills",
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is tested."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("kernels", "megacore", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def plant(tree: Path, kernel: str, old: str, new: str) -> None:
    file = tree / "kernels" / f"{kernel}.py"
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{file.name} has changed: plant the defect anew"
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("defect", NUMERICS)
def test_a_wrong_number_is_found(defect: str, tree: Path) -> None:
    kernel, old, new, test = NUMERICS[defect]
    plant(tree, kernel, old, new)
    done = interpreted("tests/kernels/test_numerics.py", "-k", test, cwd=tree)
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("defect", COMPILED)
def test_bad_code_is_found(defect: str, tree: Path) -> None:
    kernel, old, new, case, message = COMPILED[defect]
    plant(tree, kernel, old, new)
    problems = report("--only", case, cwd=tree)["problems"]
    assert problems and all(message in problem for problem in problems), problems


def test_the_undisturbed_copy_passes(tree: Path) -> None:
    """What makes the others fail is the defect alone."""
    done = interpreted("tests/kernels/test_numerics.py", "-k", "large_scores or layer_norm-33x100-fp32", cwd=tree)
    assert done.returncode == 0, done.stdout[-3000:]
