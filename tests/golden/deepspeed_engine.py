"""A loop for DeepSpeed's API, whose losses are golden: `deepspeed_engine.py [ZERO_STAGE]`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import megacore

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4))
config: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": int(sys.argv[1]) if sys.argv[1:] else 0},
}
engine, *_ = megacore.initialize(model=model, config=config)
draw = torch.Generator().manual_seed(engine.global_rank)
for _step in range(10):
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 20, generator=draw)
    loss = F.cross_entropy(engine(x), x[:, :4].argmax(dim=1))
    engine.backward(loss)
    engine.step()
    print(repr(loss.item()))
engine.close()
