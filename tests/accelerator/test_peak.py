"""The planned peak of every rank's memory against what the pretend device counts, over the layouts of test_traffic.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.parallel.mesh import build_mesh
from megacore.plan.memory import plan_memory
from megacore.plan.outline import outline
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parallel.test_traffic import CASES
from tests.parity.runs import make_config, make_trainer

pytestmark = [needs_pretend, pytest.mark.slow]
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024, "num_layers": 4}


def peak_bytes(rank: int, world_size: int, cases: list[str], directory: str) -> list[int]:
    """Of a run of three steps from its building on, by case."""
    found = []
    for case in cases:
        layout, changes = CASES[case]
        config = make_config(layout, directory, device="pretend", **{**SIZES, **changes})
        mesh = build_mesh(config.parallel)
        before = torch.accelerator.memory_allocated(mesh.device)
        torch.accelerator.reset_peak_memory_stats(mesh.device)
        trainer = make_trainer(config, mesh)
        for _ in range(3):
            trainer.train_step(next(trainer.batches))
        found.append(torch.accelerator.max_memory_allocated(mesh.device) - before)
        del trainer
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_of_memory(ranks: int, tmp_path: Path) -> None:
    cases = [name for name, ((tp, pp, dp), _) in CASES.items() if tp * pp * dp == ranks]
    counted = run_distributed(peak_bytes, ranks, cases, str(tmp_path), backend="pretend", timeout=300)
    for number, case in enumerate(cases):
        (tp, pp, dp), changes = CASES[case]
        config = make_config((tp, pp, dp), tmp_path, device="pretend", **{**SIZES, **changes})
        planned = plan_memory(config, outline(config), on_cpu=False)
        for rank, found in enumerate(counted):
            expected = planned[rank // (tp * dp)].expected_tensors
            print(f"{case:44} rank {rank}: counted {found[number]:>10,} planned {expected:>12,.0f} {expected / found[number] - 1:+.3f}")
