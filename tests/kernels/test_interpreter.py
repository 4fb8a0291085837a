"""Every Triton kernel in Triton's interpreter, where there is no GPU.

The interpreter has to be chosen before Triton is first imported, and whoever imported it otherwise cannot change that:
these files run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import triton

from tests.unit.packaging_builds import ROOT

pytestmark = pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of Triton 3.6 cannot loop under numpy 2.4 or newer",
)


@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(marker: str) -> None:
    files = (f"tests/kernels/{name}" for name in ("test_numerics.py", "test_training.py", "test_planted.py"))
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted and "skipped" not in done.stdout, "nothing was tried"
