"""Every Triton kernel in Triton's interpreter, where there is no GPU.

The interpreter has to be chosen before Triton is first imported, and whoever imported it otherwise cannot change that:
these files run in a process of their own. They take minutes: outside of continuous integration (CI is set there) they
are skipped while kernels/, megacore/ops/ and these tests are as when they last passed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton

from tests.kernels.conftest import INTERPRETED
from tests.unit.packaging_builds import ROOT

pytestmark = pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of Triton 3.6 cannot loop under numpy 2.4 or newer",
)


def _read_by_the_kernels() -> str:
    """A hash of what the interpreter's results depend on."""
    found = hashlib.sha256(f"{sys.version} {triton.__version__} {torch.__version__} {np.__version__}".encode())
    for path in sorted(
        path for name in ("kernels", "megacore/ops", "tests/kernels") for path in (ROOT / name).rglob("*.py")
    ):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()


@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(marker: str, pytestconfig: pytest.Config) -> None:
    key, now = f"megacore/interpreter-{marker.replace(' ', '-')}", _read_by_the_kernels()
    if pytestconfig.cache is not None and pytestconfig.cache.get(key, None) == now and "CI" not in os.environ:
        pytest.skip("kernels/ and megacore/ops/ are as when these tests last passed here (CI=1 runs them all the same)")
    files = (f"tests/kernels/{name}" for name in INTERPRETED)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted and "skipped" not in done.stdout, "nothing was tried"
    if pytestconfig.cache is not None:
        pytestconfig.cache.set(key, now)
