"""Checkpoints that DeepSpeed itself has written are read bit for bit. `make peers` installs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from megacore.convert.deepspeed_files import open_deepspeed
from tests.peers import interpreter_with

PYTHON = interpreter_with("deepspeed")
SCRIPT = Path(__file__).with_name("deepspeed_checkpoints.py")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="needs DeepSpeed: run `make peers`")]


@pytest.mark.parametrize(("stage", "form"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "fp32"), (3, "fp32")])
def test_the_weights_are_those_of_deepspeed(stage: int, form: str, tmp_path: Path) -> None:
    run = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*run, str(stage), form, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    found = open_deepspeed(tmp_path).weights()
    assert found.keys() == full.keys() | {"scale"}
    assert all(torch.equal(found[name], value) for name, value in full.items())
