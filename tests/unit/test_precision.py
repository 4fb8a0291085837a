"""The loss scale, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacore.config import PrecisionConfig
from megacore.optim.update import LossScaler
from megacore.parallel.random import Dropout, RandomStreams


def scaler(**changes: object) -> LossScaler:
    values = {"precision": "fp16", "initial_loss_scale": 16.0, "loss_scale_window": 3, "hysteresis": 2} | changes
    return LossScaler(PrecisionConfig(**values).resolve(1))  # type: ignore[arg-type]


# Settings; good (+) and overflowing (-) steps; and the scale after each.
SCALES: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "it doubles after a window of good steps": ({}, "+++++++", [16, 16, 32, 32, 32, 64, 64]),
    "it halves after as many overflows as hysteresis allows": ({}, "----", [16, 8, 4, 2]),
    "growth restores the allowance": ({}, "-+++--", [16, 16, 16, 32, 32, 16]),
    "no overflow lowers the least": ({"hysteresis": 1, "min_loss_scale": 8.0}, "--", [8, 8]),
    "growth ends within fp32": ({"initial_loss_scale": 2.0**126, "loss_scale_window": 1}, "+++", [2.0**127] * 3),
    "an overflow begins the window anew": ({"hysteresis": 1}, "++-+++", [16, 16, 8, 8, 8, 16]),
    "a fixed scale stays": ({"loss_scale": 128.0}, "-++++++++++", [128] * 11),
    "and that of bf16": ({"precision": "bf16"}, "-++++++++++", [1] * 11),
}


@pytest.mark.parametrize("case", SCALES)
def test_the_scale_step_by_step(case: str) -> None:
    changes, steps, expected = SCALES[case]
    one, found = scaler(**changes), []
    for number, step in enumerate(steps):
        if step == "+":
            one.good_step()
        else:
            could_be_lowered = one.overflow()
            assert could_be_lowered == (number == 0) or not case.startswith("no overflow")
        found.append(one.scale)
    assert found == expected


@pytest.mark.parametrize(
    "given, microbatches, expected",
    [
        ({}, 1, 2.0**16),
        ({}, 3, 2.0**18),
        ({}, 2048, 2.0**27),
        ({"min_loss_scale": 2.0**20}, 2, 2.0**20),
        ({"initial_loss_scale": 4.0}, 2048, 4.0),
        ({"loss_scale": 4.0}, 2048, None),
        ({"precision": "bf16"}, 2048, None),
    ],
)
def test_the_first_scale_makes_up_for_the_number_of_microbatches(
    given: dict[str, Any], microbatches: int, expected: float | None
) -> None:
    config = PrecisionConfig(**{"precision": "fp16", **given}).resolve(microbatches)
    assert config.initial_loss_scale == expected


def test_a_saved_scale_goes_on() -> None:
    one, other = scaler(), scaler()
    one.overflow()
    one.good_step()
    other.load_state(one.state())
    for each in (one, other):
        each.good_step()
        each.good_step()
        each.overflow()
    assert one.state() == other.state()


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_are_the_plain_product_bit_for_bit(dtype: torch.dtype) -> None:
    streams = RandomStreams(7, torch.device("cpu"))
    dropout = Dropout(0.3, streams, "blocks.0.mlp_dropout")
    x = torch.randn(5, 33, 17).to(dtype).requires_grad_()
    gradient = torch.randn(5, 33, 17).to(dtype)
    mask = torch.empty(x.shape).bernoulli_(0.7, generator=streams.generator("blocks.0.mlp_dropout", 0))
    factor = mask.div_(0.7)  # fp32, whatever x is

    output = dropout(x)
    output.backward(gradient)
    assert output.dtype == dtype
    assert torch.equal(output, (x.detach().float() * factor).to(dtype))
    assert x.grad is not None
    assert torch.equal(x.grad, (gradient.float() * factor).to(dtype))
    assert float((factor == 0).float().mean()) == pytest.approx(0.3, abs=0.05)


def test_the_mean_of_bf16_activations_stays() -> None:
    """Over n = 2^24 elements the mean strays by sqrt(p / (1 - p) / n) = 8e-5 of itself; five times that is allowed, and
    4e-4 more, as the products of only 128 different mantissas are rounded: four times 2^-9 / sqrt(3 x 128). A factor of
    1 / 0.9 in bf16, 1.109, makes the mean 1.6e-3 too small."""
    streams, p = RandomStreams(7, torch.device("cpu")), 0.1
    dropout = Dropout(p, streams, "blocks.0.mlp_dropout")
    x = (1.0 + torch.rand(2**20, generator=torch.Generator().manual_seed(5))).bfloat16()
    mean = 0.0
    for microbatch in range(16):
        streams.microbatch = microbatch
        mean += float(dropout(x).double().mean() / x.double().mean()) / 16
    assert mean == pytest.approx(1.0, abs=5 * math.sqrt(p / (1 - p) / 2**24) + 4e-4)


def test_one_byte_an_element_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    dropout = Dropout(0.1, RandomStreams(7, torch.device("cpu")), "blocks.0.mlp_dropout")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(torch.randn(8, 16, requires_grad=True))
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 8 * 16
