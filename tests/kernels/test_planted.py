"""The tests of the kernels find what they are there to find: each defect, planted in a copy of a kernel, fails them.

test_interpreter.py runs this file; test_compiled.py plants the defects that the compiler's output shows.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

from tests.cases import cases
from tests.kernels import test_numerics
from tests.kernels.comparisons import comparisons
from tests.kernels.conftest import INTERPRETING
from tests.unit.packaging_builds import ROOT

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="test_interpreter.py runs it")


def formula(name: str, dtype: str, device: torch.device) -> None:
    """The test of a kernel against its formula, for the comparison of this name."""
    (comparison,) = (c for c in comparisons() if c.name == name)
    test_numerics.test_kernel_is_its_formula(comparison, dtype, device)


DEFECTS = cases("defects-of-kernels", globals())


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
