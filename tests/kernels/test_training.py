"""The model with Triton kernels against the model in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore import ops
from megacore.parallel.mesh import Mesh
from tests.parity.runs import RaggedData, make_config, make_trainer

pytestmark = pytest.mark.on_device


def losses(choice: ops.Choice, output_dir: Path, device: torch.device, **changes: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of 20 steps."""
    # Every token is a program of its own in most kernels, and Triton's interpreter takes milliseconds for each.
    small = {"num_layers": 1, "num_attention_heads": 2, "seq_length": 5, "global_batch_size": 1, "micro_batch_size": 1}
    config = make_config((1, 1, 1), output_dir, **small, **changes)
    ragged = RaggedData(config.training.train_iters)
    data = [{name: values[: config.data.seq_length] for name, values in ragged[i].items()} for i in range(len(ragged))]
    with ops.kernels_chosen(choice):
        trainer = make_trainer(config, Mesh(device=device), data)
        steps = [trainer.train_step(next(trainer.batches)) for _ in range(20)]
    return [(float(step.loss), float(step.grad_norm)) for step in steps]


@pytest.mark.parametrize(
    "changes", [{}, {"attention": "fused-softmax", "z_loss": 1e-3, "label_smoothing": 0.1}], ids=str
)
def test_twenty_steps_are_those_of_plain_torch(tmp_path: Path, device: torch.device, changes: dict[str, Any]) -> None:
    plain = losses("torch", tmp_path, device, **changes)
    found = losses("triton", tmp_path, device, **changes)
    for (loss, norm), (expected, expected_norm) in zip(found, plain, strict=True):
        assert loss == pytest.approx(expected, rel=0, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert plain[-1][0] != plain[0][0]
