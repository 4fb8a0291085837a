"""The model with Triton kernels against the model in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import ops
from megacore.parallel.mesh import Mesh
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import RaggedData, make_config, make_trainer

pytestmark = pytest.mark.on_device
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.2}


def losses(
    choice: ops.Choice, output_dir: Path, device: torch.device, count: int, **changes: Any
) -> list[tuple[float, float]]:
    """Loss and gradient norm of some steps."""
    # Every token is a program of its own in most kernels, and Triton's interpreter takes milliseconds for each.
    small = {"num_layers": 1, "num_attention_heads": 2, "seq_length": 5, "global_batch_size": 1, "micro_batch_size": 1}
    config = make_config((1, 1, 1), output_dir, **small, **changes)
    ragged = RaggedData(config.training.train_iters)
    data = [{name: values[: config.data.seq_length] for name, values in ragged[i].items()} for i in range(len(ragged))]
    with ops.kernels_chosen(choice):
        trainer = make_trainer(config, Mesh(device=device), data)
        steps = [trainer.train_step(next(trainer.batches)) for _ in range(count)]
    return [(float(step.loss), float(step.grad_norm)) for step in steps]


ALL: dict[str, Any] = {"attention": "fused-softmax", "z_loss": 1e-3, "label_smoothing": 0.1, "loss_chunks": 3}
ALL |= {"normalization": "RMSNorm", "activation": "swiglu"}


@pytest.mark.parametrize("changes", [{}, ALL], ids=str)
def test_steps_are_those_of_plain_torch(tmp_path: Path, device: torch.device, changes: dict[str, Any]) -> None:
    steps = 2 if device.type == "cpu" else 20
    plain = losses("torch", tmp_path, device, steps, **changes)
    found = losses("triton", tmp_path, device, steps, **changes)
    for (loss, norm), (expected, expected_norm) in zip(found, plain, strict=True):
        assert loss == pytest.approx(expected, rel=0, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert plain[-1][0] != plain[0][0]


def test_masks_of_a_kernel_are_the_same_whenever_a_block_is_computed(tmp_path: Path, device: torch.device) -> None:
    """Again for backward, or in a backward of its own for weights."""
    (expected,) = losses("triton", tmp_path, device, 1, **DROPOUT)
    for changes in ({"recompute": "full"}, {"schedule": "zero-bubble"}):
        (found,) = losses("triton", tmp_path, device, 1, **DROPOUT, **changes)
        assert found == pytest.approx(expected, rel=1e-6), changes


class Fused(TorchDispatchMode):
    """Our operators, each with `+` if it adds a residual or a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "megacore":
            adds = len(args) > 1 and args[1] is not None and operator.overloadpacket.__name__.endswith("_forward")
            self.names.append(operator.overloadpacket.__name__.removesuffix("_forward") + "+" * adds)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("style", "dropout", "expected"),
    [
        ("gpt", 0.0, ["norm", "norm+", "gelu+"]),
        ("gpt", 0.2, ["norm", "dropout_add", "norm", "gelu+", "dropout_add"]),
        ("bert", 0.0, ["norm+", "norm+"]),
    ],
)
def test_a_block_uses_the_fused_operators(
    style: str, dropout: float, expected: list[str], tmp_path: Path, device: torch.device
) -> None:
    changes = {"num_layers": 1, "hidden_dropout": dropout, "attention_dropout": 0.0}
    with ops.kernels_chosen("triton"):
        if style == "gpt":
            trainer = make_trainer(make_config((1, 1, 1), tmp_path, **changes), Mesh(device=device))
        else:
            trainer = make_bert_trainer(make_bert_config((1, 1, 1), tmp_path, **changes), Mesh(device=device))
        block = trainer.model.chunks[0].layers[1].train()
        x = torch.ones(1, 16, 32, device=device)
        given = x if style == "gpt" else (x, torch.ones(1, 16, device=device, dtype=torch.int64))
        with Fused() as found:
            block(given)
    assert found.names == expected
