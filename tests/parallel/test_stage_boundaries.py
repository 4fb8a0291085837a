"""What stages of any model may hand to each other, and what holds of layers that no gradient passes or that are
checkpointed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config import OptimizerConfig
from megacore.errors import UserError
from megacore.train.engine import Layer
from tests.distributed import run_distributed
from tests.parallel.test_engine import UNIFORM, batch, engine_of, linear


class Codes(nn.Module):
    """Whole numbers out: no gradient comes back."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * 2).long().clamp(0, 9)


class Spectrum(nn.Module):
    """Complex numbers out, of which the next stage takes the conjugates' real and imaginary parts."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Parts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.conj().real + x.conj().imag


def between_stages() -> list[list[Layer]]:
    """Models whose stages hand each other what is not real, on three stages of layers of their own."""
    embedding = Layer("b", lambda: nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(36, 6)))
    return [[Layer("a", Codes), embedding, linear("c")], [linear("a"), Layer("b", Spectrum), Layer("c", Parts)]]


def train_between(rank: int, world_size: int, schedules: list[str]) -> list[list[float]]:
    found = []
    for layers in between_stages():
        for schedule in schedules:
            engine = engine_of(layers, world_size, parallel=UNIFORM | {"schedule": schedule})
            found.append([engine.train_batch(engine.split(*batch(step))).item() for step in range(3)])
            found[-1] += [float(engine.grad_norm), engine.evaluate(engine.split(*batch(3)))]
    return found


def test_stages_may_hand_on_what_is_not_real() -> None:
    """Integers, behind which no gradient travels, and complex numbers, whose gradients are complex."""
    expected = train_between(0, 1, ["1f1b", "1f1b"])
    for found, one in zip(run_distributed(train_between, 3, ["1f1b", "zero-bubble"])[0], expected, strict=True):
        assert found == pytest.approx(one, rel=1e-6)


class Checkpointed(nn.Module):
    """Two linear layers that keep only their input."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def train_one_step(rank: int, world_size: int, layers: list[Layer], schedule: str = "1f1b") -> tuple[Any, ...]:
    engine = engine_of(layers, world_size, parallel=UNIFORM | {"schedule": schedule})
    before = engine.state_dict()
    loss = engine.train_batch(engine.split(*batch(0))).item()
    return loss, before, engine.state_dict()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # when the layers are tried
def test_checkpointed_layers_are_split_or_refused() -> None:
    layers = [linear("a"), Layer("b", Checkpointed, False), linear("c")]
    split, whole = (train_one_step(0, 1, layers, schedule) for schedule in ("zero-bubble", "1f1b"))
    assert split[0] == whole[0]
    for name, weight in whole[2].items():
        torch.testing.assert_close(split[2][name], weight, rtol=1e-5, atol=1e-6)
    layers = [linear("a"), Layer("b", Checkpointed, True), linear("c")]
    assert train_one_step(0, 1, layers)[0] == whole[0]
    with pytest.raises(UserError, match="use_reentrant=True, whose backward cannot be split"):
        train_one_step(0, 1, layers, "zero-bubble")


def test_what_a_later_stage_detaches_has_a_gradient_of_zero() -> None:
    """As the manual says: weight decay alone moves it, and on one stage nothing does."""
    layers = [linear("a"), Layer("b", Detach), linear("c")]
    alone, cut = train_one_step(0, 1, layers), run_distributed(train_one_step, 3, layers)[0]
    assert cut[0] == pytest.approx(alone[0], rel=1e-6)
    assert torch.equal(alone[2]["a.weight"], alone[1]["a.weight"])
    decayed = alone[1]["a.weight"] * (1 - 1e-2 * OptimizerConfig().weight_decay)
    torch.testing.assert_close(cut[2]["a.weight"], decayed, rtol=1e-6, atol=0)
    assert torch.equal(cut[2]["a.bias"], alone[2]["a.bias"])
    for name in ("c.weight", "c.bias"):
        torch.testing.assert_close(cut[2][name], alone[2][name], rtol=1e-6, atol=1e-8)
