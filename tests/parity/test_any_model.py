"""The engine trains plain nn.Modules as plain torch does, whatever the layout and the schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megacore.config import ParallelConfig, WatchConfig
from megacore.train.engine import PipelineEngine
from tests.distributed import run_distributed
from tests.matrix.runner import changes_of
from tests.parity.plain_models import ADAMW, MODELS, OPTIMIZER, SEED, Model, Result, plain_torch
from tests.parity.runs import gather

STEPS = 4
# A model, and words as in tests/matrix, by ranks. In `make test` every model, schedule and ZeRO stage is there once.
CASES = {
    1: ["cnn", "tokens zb", "bare compiled"],
    2: ["cnn pp2 interleaved virtual2", "cnn dp2 z3", "tokens pp2 uniform zb", "tokens dp2 z2", "bare pp2"],
    4: ["bare pp4 uniform zb", "tokens pp2 dp2 zb z1"],
}
MORE = {
    2: [
        *(f"{name} pp2 {words}" for name in MODELS for words in ("", "interleaved virtual2", "uniform zb")),
        *("cnn pp2 gpipe", "cnn dp2", "tokens dp2 z1"),
    ],
    4: [
        *(f"{name} {words}" for name in MODELS for words in ("pp4 uniform", "pp4 uniform zb", "pp2 dp2 zb")),
        *("cnn pp4 uniform interleaved virtual2", "cnn pp2 dp2 interleaved virtual2 z3", "tokens pp2 dp2 z2"),
        *("tokens pp2 dp2 interleaved virtual2 z3", "tokens pp2 dp2 zb z3", "bare pp2 dp2 uniform z3"),
        *("bare pp2 dp2 uniform zb z2", "cnn pp4 uniform compiled", "tokens pp2 dp2 zb compiled"),
    ],
}


def parse(case: str) -> tuple[Model, dict[str, Any]]:
    """The model of a case, and its changes by field name."""
    name, _, words = case.partition(" ")
    return MODELS[name], changes_of(words.replace("uniform", "pipeline_balance=uniform"))


def make_engine(case: str) -> PipelineEngine:
    model, changes = parse(case)
    options = {name: changes.pop(name) for name in [*changes] if name.startswith("compile")}
    return PipelineEngine(
        model.layers,
        loss=model.loss,
        reduction=model.reduction,
        count=model.count,
        parallel=ParallelConfig(**{"pp": 1, "dp": 1, "device": "cpu", "bucket_size_mb": 1e-3, **changes}),
        optimizer=OPTIMIZER,
        optimizer_settings=ADAMW,
        num_microbatches=4 // changes.get("dp", 1),
        train_iters=STEPS,
        seed=SEED,
        watch=WatchConfig(hang_timeout_minutes=0.0),
        **options,
    )


def train(case: str) -> Result:
    """Train on this rank; every rank returns what came out."""
    engine, (model, _) = make_engine(case), parse(case)
    own = slice(engine.mesh.batch.rank, None, engine.mesh.batch.size)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        losses.append(float(engine.train_batch(model.batch(step)[own])))
        norms.append(float(engine.grad_norm))
        if step == 0:
            gradients = gather(engine, engine.mesh, lambda owned: owned.gradient)
    final = gather(engine, engine.mesh, lambda owned: owned.master)
    return Result(losses, norms, gradients, final, engine.evaluate(model.batch(STEPS)[own]))


def train_all(rank: int, world_size: int, cases: list[str]) -> list[Result]:
    return [train(case) for case in cases]


@cache
def reference(name: str) -> Result:
    return plain_torch(MODELS[name], STEPS)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        *(pytest.param(*item, id=f"{item[0]} ranks") for item in CASES.items()),
        *(pytest.param(*item, id=f"{item[0]} ranks more", marks=pytest.mark.slow) for item in MORE.items()),
    ],
)
def test_it_trains_as_plain_torch_does(world_size: int, cases: list[str]) -> None:
    results = run_distributed(train_all, world_size, cases, timeout=240, stay=True)[0]
    for case, found in zip(cases, results, strict=True):
        print(case)  # shown where it fails
        expected = reference(case.split()[0])
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        assert found.gradients.keys() == expected.gradients.keys()
        for parameter, gradient in expected.gradients.items():
            error = (found.gradients[parameter] - gradient).abs().max()
            assert float(error) <= 1e-6 * max(1.0, float(gradient.abs().max())), parameter
            torch.testing.assert_close(found.final[parameter], expected.final[parameter], rtol=1e-5, atol=1e-6)
        if not case.startswith("cnn") or "dp" not in case:  # batch norm's running statistics are those of a replica
            assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-6)
