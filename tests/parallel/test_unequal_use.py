"""Replicas that use different parameters in the same microbatch: experts, and layers that are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.config import OptimizerConfig, SGDConfig
from megacore.train.engine import Layer
from tests.distributed import run_distributed
from tests.parallel.test_engine import engine_of

STEPS, SAMPLES = 4, 16


class Choose(nn.Module):
    """Another expert for each sign of the last column, which passes through, behind a layer for one sign only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.positive = nn.Linear(width, width)
        self.negative = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, sign = x[:, :-1], x[:, -1:]
        positive = bool(sign[0] > 0)
        h = h + self.before(h) if positive else h
        return torch.cat([self.positive(h) if positive else self.negative(h), sign], 1)


class Skip(nn.Module):
    """A residual layer that microbatches of one sign leave out."""

    def __init__(self, width: int, sign: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1] + self.inner(x[:, :-1]), x[:, -1:]], 1) if x[0, -1] * self.sign > 0 else x


class First(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x), x[:, :1]], 1)


class Last(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :-1])


def train(width: int, dp: int = 1, **parallel: Any) -> tuple[list[float], dict[str, Tensor]]:
    layers = [
        Layer("first", First, width),
        Layer("choose", Choose, width),
        Layer("skip", Skip, width, 1),
        Layer("other", Skip, width, -1),
        Layer("last", Last, width),
    ]
    # Plain SGD: an error of a gradient is an error of a weight, in proportion.
    optimizer = OptimizerConfig(optimizer="sgd", lr=0.1, weight_decay=0.0, lr_decay_style="constant", clip_grad=0.0)
    plain = SGDConfig(sgd_momentum=0.0)
    engine = engine_of(layers, dp=dp, parallel=parallel, optimizer=optimizer, optimizer_settings=plain)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(SAMPLES, 6, generator=draw) for _ in range(2))
        # Microbatches take turns at the replicas: of each two one is positive, and in odd steps all are.
        signs = torch.tensor([1.0, 1.0 if step % 2 else -1.0]).repeat(2).repeat_interleave(SAMPLES // 4)
        x[:, 0] = x[:, 0].abs() * signs
        losses.append(engine.train_batch(engine.split(x, y)).item())
    return losses, engine.state_dict()


def train_all(rank: int, world_size: int, width: int, cases: list[dict[str, Any]]) -> list[Any]:
    return [train(width, dp=world_size, **case) for case in cases]


@pytest.mark.parametrize(("width", "bucket_size_mb"), [(8, 1e-6), pytest.param(64, 25.0, marks=pytest.mark.slow)])
def test_replicas_may_use_different_parameters(width: int, bucket_size_mb: float) -> None:
    """Buckets of one parameter, of which several are of one size; and of a quarter of the model."""
    expected, weights = train(width)
    cases = [{"zero_stage": stage, "bucket_size_mb": bucket_size_mb} for stage in range(4)]
    for found in run_distributed(train_all, 2, width, cases, stay=True):
        for case, (losses, state) in zip(cases, found, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), case
            wrong = {name for name, weight in weights.items() if (state[name] - weight).abs().max() > 1e-6}
            assert not wrong, case
