"""Checkpoints of runs on the accelerator: the weights and optimizer state that are in its memory, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megacore.checkpoint.choose import whole
from megacore.checkpoint.directory import published
from megacore.parallel.mesh import ALONE, build_mesh
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parallel.test_stopping import stored
from tests.parity.runs import make_config, make_trainer

pytestmark = needs_pretend

CASES: list[dict[str, Any]] = [
    {"zero_stage": 0, "async_save": True},
    {"zero_stage": 1, "offload_optimizer": True},
    {"zero_stage": 1, "offload_optimizer": True, "async_save": True},
    {"zero_stage": 3},
]


def train_and_save(rank: int, world_size: int, directory: str, device: str, cases: list[dict[str, Any]]) -> None:
    """Two steps of each case, saved into a directory of its own."""
    for number, options in enumerate(cases):
        changes = {"train_iters": 2, "num_layers": 2, "optimizer": "sgd", "device": device, **options}
        config = make_config((1, 1, 2), Path(directory, f"{device}-{number}"), **changes)
        make_trainer(config, build_mesh(config.parallel)).run()


def test_what_is_saved_equals_a_run_on_the_cpu(tmp_path: Path) -> None:
    run_distributed(train_and_save, 2, str(tmp_path), "pretend", CASES, backend="pretend")
    run_distributed(train_and_save, 2, str(tmp_path), "cpu", [{}])
    (on_cpu,) = published(tmp_path / "cpu-0")
    for number, options in enumerate(CASES):
        (on_device,) = published(tmp_path / f"pretend-{number}")
        assert whole(on_device, ALONE) is None, options
        for kind in ("model", "momentum_buffer"):
            found, expected = stored(on_device, kind), stored(on_cpu, kind)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{options} {kind} {name}")
