"""The tests of the kernels find what they are there to find: each defect, planted in a copy of a kernel, fails them.

test_interpreter.py runs this file; test_compiled.py plants the defects that the compiler's output shows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.kernels import test_numerics
from tests.kernels.comparisons import comparisons
from tests.kernels.conftest import INTERPRETING
from tests.unit.packaging_builds import ROOT

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="test_interpreter.py runs it")


def formula(name: str, dtype: str, device: torch.device) -> None:
    """The test of a kernel against its formula, for the comparison of this name."""
    (comparison,) = (c for c in comparisons() if c.name == name)
    test_numerics.test_kernel_is_its_formula(comparison, dtype, device)


DEFECTS: dict[str, tuple[str, str, str, Callable[[torch.device], None]]] = {
    "no causal mask": (
        "softmax", '    if MASKED:\n        x = tl.where((columns >= first) & (columns < last), x, float("-inf"))\n',
        "", partial(formula, "fused_softmax-causal-13x13", "fp32"),
    ),
    "no maximum subtracted from scores": (
        "softmax", "tl.exp(x - peak)\n    total", "tl.exp(x)\n    total",
        test_numerics.test_softmax_of_large_scores_is_finite,
    ),
    "a bf16 load that is not widened": (
        "norm", "    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    if HAS_RESIDUAL:",
        "    x = tl.load(x_ptr + at, mask=inside, other=0.0)\n    if HAS_RESIDUAL:",
        partial(formula, "rms_norm-17x52", "bf16"),
    ),
    "the last row of an expert left out": (
        "grouped", "for first in range(start, stop, K):", "for first in range(start, stop - 1, K):",
        partial(formula, "grouped_linear-23x40-to-33-of-5", "fp32"),
    ),
    "the weight of another choice": (
        "permute", "x = x * tl.load(weights_ptr + token * CHOSEN + number)",
        "x = x * tl.load(weights_ptr + token * CHOSEN)", partial(formula, "experts_rows-7x3x77", "fp32"),
    ),
    "another mask in backward": (
        "dropout", "    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    kept = _kept(seed,",
        "    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    kept = _kept(seed + 1,",
        partial(formula, "dropout_add-5x100", "fp32"),
    ),
}  # fmt: skip


def replace_kernel(kernel: str, source: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the operators use this source; it needs a file, for Triton reads the functions from there."""
    package, name = importlib.import_module("megacore.kernels"), f"megacore.kernels.{kernel}"
    importlib.import_module(name)
    folder.mkdir()
    (folder / f"{kernel}.py").write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, folder / f"{kernel}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch.setattr(package, kernel, module)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_number_is_found(
    defect: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, old, new, test = DEFECTS[defect]
    source = (ROOT / "kernels" / f"{kernel}.py").read_text(encoding="utf-8")
    assert old in source, f"{kernel}.py has changed: plant the defect anew"
    replace_kernel(kernel, source, tmp_path / "undisturbed", monkeypatch)
    test(device)  # passes: what makes it fail below is the defect alone
    replace_kernel(kernel, source.replace(old, new), tmp_path / "planted", monkeypatch)
    with pytest.raises(AssertionError):
        test(device)
