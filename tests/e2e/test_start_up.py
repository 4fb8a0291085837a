"""What a run loads: every rank pays for it, before its first step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.launching import environment

CODE = """
import sys
import pretrain_gpt
for number, flags in enumerate(["", "--optimizer muon --normalization RMSNorm --recompute light"]):
    assert pretrain_gpt.main([*sys.argv[1:], "--output-dir", f"run{number}", *flags.split()]) == 0
slow = "torch._dynamo", "sympy", "triton", "transformers", "wandb"
print("loaded:", *(name for name in slow if name in sys.modules))
"""


def test_a_run_loads_neither_a_compiler_nor_what_it_does_not_use(tmp_path: Path) -> None:
    """torch would load its compiler at the first operator of ours, and sympy at the first backward: four seconds."""
    words = ["--mock-data", "--vocab-size", "128", "--preset", "gpt2-tiny", "--train-iters", "2"]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
