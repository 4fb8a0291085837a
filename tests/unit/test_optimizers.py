"""Every optimizer against torch.optim or its paper's formula, in fp64, for twenty steps on one process."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore import config
from megacore.config import OptimizerSettings
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.zero.data_parallel import DataParallel
from megacore.zero.options import ZeroOptions
from tests.parity.runs import make_config

STEPS, LR, DECAY = 20, 1e-2, 0.1
SHAPES = {
    "embedding.tokens.weight": (11, 6), "blocks.0.up.weight": (12, 6), "blocks.0.up.bias": (12,),
    "blocks.0.attention.qkv.weight": (18, 6), "blocks.0.down.weight": (6, 12), "blocks.0.norm.weight": (6,),
}  # fmt: skip
ADAM = config.AdamWConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
Weights = dict[str, Tensor]
Reference = Callable[[Weights, list[Weights]], None]


class Parameters(torch.nn.Module):
    """A layer with the parameters of SHAPES."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for number, (name, value) in enumerate(weights.items()):
            spec = ShardSpec(name=name, shape=tuple(value.shape))
            self.register_parameter(f"p{number}", ShardedParameter(value.float().clone(), spec))


def drawn(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).double() for name, shape in SHAPES.items()}


def updated(
    settings: OptimizerSettings, weights: Weights, gradients: list[Weights], *, dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Weights:  # fmt: skip
    """The weights after megacore's updates, from gradients of a dtype that are clipped by a factor."""
    alone = Mesh(device=torch.device("cpu"))
    options = ZeroOptions(optimizer=settings, compute_dtype=dtype, reduce_dtype=dtype)
    data_parallel = DataParallel([[Parameters(weights)]], alone, options=options, bucket_bytes=1 << 20)
    kind = OPTIMIZER_CLASSES[type(settings)]
    optimizer = kind(data_parallel.runs, settings, weight_decay=DECAY, adam=ADAM)
    run = make_config((1, 1, 1), "output", hidden_size=6, num_attention_heads=2)
    optimizer.attach(data_parallel.segments, alone, run)
    for of_step in gradients:
        for bucket in data_parallel.in_order_of_use():
            runs = bucket.runs
            for parameter in bucket.parameters:
                parameter.grad = of_step[parameter.spec.name].to(dtype).clone()
            flat = [None if (gradient := run.gradient) is None else gradient.float() for run in runs]
            with torch.no_grad():
                optimizer.step(runs, flat, lr=LR, factor=torch.full((), factor))
        optimizer.finish()
    return {local.spec.name: local.master.view(local.spec.shape).clone() for local in data_parallel.segments}


def torchs(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Reference:
    """An optimizer of torch.optim; vectors do not decay."""

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        matrices = [weight for weight in weights.values() if weight.dim() > 1]
        vectors = [weight for weight in weights.values() if weight.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = make(groups, lr=LR, weight_decay=DECAY, **options)
        for of_step in gradients:
            for name, weight in weights.items():
                weight.grad = of_step[name].clone()
            optimizer.step()

    return reference


def decay_of(weight: Tensor) -> float:
    return DECAY if weight.dim() > 1 else 0.0


def lion(weights: Weights, gradients: list[Weights]) -> None:
    """Chen et al. 2023, algorithm 2."""
    for name, weight in weights.items():
        momentum = torch.zeros_like(weight)
        for of_step in gradients:
            direction = torch.sign(0.8 * momentum + 0.2 * of_step[name])
            weight -= LR * (direction + decay_of(weight) * weight)
            momentum = 0.95 * momentum + 0.05 * of_step[name]


def lamb(least: float, most: float) -> Reference:
    """You et al. 2020, algorithm 2, with limits of the trust ratio; vectors have the ratio 1."""

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        for name, weight in weights.items():
            mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
            for number, of_step in enumerate(gradients, start=1):
                mean = 0.8 * mean + 0.2 * of_step[name]
                square = 0.95 * square + 0.05 * of_step[name] ** 2
                r = mean / (1 - 0.8**number) / ((square / (1 - 0.95**number)).sqrt() + 1e-6)
                step = r + decay_of(weight) * weight
                ratio = min(max(float(weight.norm() / step.norm()), least), most) if weight.dim() > 1 else 1.0
                weight -= LR * ratio * step

    return reference


def iterated(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return iterated(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def muon(scale: Callable[[int, int], float]) -> Reference:
    """Liu et al. 2025, section 2; in the projection of queries, keys and values a matrix is that of one head."""
    heads = [slice(start, start + 3) for start in range(0, 18, 3)]

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        for name, weight in weights.items():
            if not name.startswith("blocks.") or weight.dim() == 1:
                ADAMW({name: weight}, gradients)
                continue
            momentum = torch.zeros_like(weight)
            for of_step in gradients:
                momentum = 0.9 * momentum + 0.1 * of_step[name]
                step = torch.empty_like(weight)
                for rows in heads if "qkv" in name else [slice(None)]:
                    matrix = momentum[rows]
                    step[rows] = 0.2 * scale(*matrix.shape) ** 0.5 * iterated(matrix)
                weight *= 1 - LR * DECAY
                weight -= LR * step

    return reference


def torchs_muon(weights: Weights, gradients: list[Weights]) -> None:
    """In fp32, because its iteration is in bf16 and would round otherwise."""
    matrices = {n: w.float() for n, w in weights.items() if n.startswith("blocks.") and w.dim() == 2}
    optimizer = torch.optim.Muon(matrices.values(), lr=LR, weight_decay=DECAY, momentum=0.9)
    for of_step in gradients:
        for name, weight in matrices.items():
            weight.grad = of_step[name].float()
        optimizer.step()
    others = {name: weight for name, weight in weights.items() if name not in matrices}
    ADAMW(others, gradients)
    for name, weight in matrices.items():
        weights[name].copy_(weight)


def torchs_adafactor(eps1: float) -> Reference:
    """The embedding is not factored, as if it were a vector, and decays all the same."""
    options: dict[str, Any] = {"beta2_decay": -0.7, "eps": (eps1, 1e-2), "d": 1.0}

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        name = "embedding.tokens.weight"
        others = {other: weight for other, weight in weights.items() if other != name}
        torchs(torch.optim.Adafactor, **options)(others, gradients)
        flat = weights[name].view(-1)
        optimizer = torch.optim.Adafactor([flat], lr=LR, weight_decay=DECAY, **options)
        for of_step in gradients:
            flat.grad = of_step[name].reshape(-1)
            optimizer.step()

    return reference


ADAMW = torchs(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6)
SGD: dict[str, Any] = {"sgd_momentum": 0.8}
HEADS: dict[str, Any] = {"muon_momentum": 0.9, "muon_nesterov": False, "muon_split_qkv": "heads"}
FACTORED: dict[str, Any] = {"adafactor_beta2_decay": -0.7, "adafactor_eps2": 1e-2}
MUON: dict[str, Any] = {"muon_momentum": 0.9, "muon_ns_dtype": "bf16", "muon_scale_mode": "shape_scaling"}
CASES: dict[str, tuple[OptimizerSettings, Reference]] = {
    "adamw": (ADAM, ADAMW),
    "adam": (config.AdamConfig(), torchs(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-6)),
    "sgd": (config.SGDConfig(**SGD), torchs(torch.optim.SGD, momentum=0.8)),
    "nesterov": (config.SGDConfig(**SGD, sgd_nesterov=True), torchs(torch.optim.SGD, momentum=0.8, nesterov=True)),
    "sgd-plain": (config.SGDConfig(sgd_momentum=0.0), torchs(torch.optim.SGD)),
    "lamb": (config.LambConfig(), lamb(0.0, math.inf)),
    "lamb-limits": (config.LambConfig(lamb_min_coeff=0.5, lamb_max_coeff=1.1), lamb(0.5, 1.1)),
    "muon": (config.MuonConfig(**HEADS), muon(max)),
    "muon-rms": (config.MuonConfig(**HEADS, muon_scale_mode="unit_rms_norm"), muon(operator.truediv)),
    "muon-torch": (config.MuonConfig(**MUON, muon_extra_scale_factor=1.0, muon_split_qkv="none"), torchs_muon),
    "adafactor": (config.AdafactorConfig(**FACTORED), torchs_adafactor(1e-7)),
    "adafactor-floor": (config.AdafactorConfig(**FACTORED, adafactor_eps1=0.9), torchs_adafactor(0.9)),
    "lion": (config.LionConfig(lion_beta1=0.8, lion_beta2=0.95), lion),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_an_independent_implementation(case: str) -> None:
    settings, reference = CASES[case]
    weights, gradients = drawn(0), [drawn(step) for step in range(1, STEPS + 1)]
    found = updated(settings, weights, gradients)
    expected = {name: value.clone() for name, value in weights.items()}
    with torch.no_grad():
        reference(expected, gradients)
    for name, value in expected.items():
        assert not torch.equal(value, weights[name]), name
        error = (found[name].double() - value).abs().max() / value.abs().max()
        assert error <= 1e-6, f"{name}: {error}"


def test_adafactor_takes_the_same_steps_from_gradients_in_16_bits() -> None:
    weights = drawn(0)
    gradients = [{name: value.bfloat16() for name, value in drawn(step).items()} for step in range(1, STEPS + 1)]
    found, expected = (
        updated(config.AdafactorConfig(), weights, gradients, dtype=dtype, factor=0.3)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_every_optimizer_is_compared() -> None:
    elsewhere = {config.OneBitAdamConfig, config.OneBitLambConfig}  # tests/parity/test_precision.py
    assert {type(settings) for settings, _ in CASES.values()} == set(OPTIMIZER_CLASSES) - elsewhere
