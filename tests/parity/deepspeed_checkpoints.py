"""Trains a small model with DeepSpeed, and saves its checkpoint with the full weights beside it; a rank of torchrun.

    torchrun --nproc-per-node 2 tests/parity/deepspeed_checkpoints.py STAGE bf16|fp32 DIRECTORY

It imports nothing of megacore, so that any environment with DeepSpeed runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """With sizes that no number of ranks divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 11, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.embedding(x))))


def main(stage: int, form: str, directory: Path) -> None:
    """Trains three steps, and saves."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    # Shared memory needs a C++ compiler, and gloo does the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": form == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        x = torch.randint(11, (2, 4))
        engine.backward(F.cross_entropy(engine(x).flatten(0, 1).float(), x.flatten()))
        engine.step()
    engine.save_checkpoint(str(directory))
    full = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        torch.save({name: value.cpu() for name, value in full.items()}, directory / "full.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
