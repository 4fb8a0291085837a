"""The engine trains plain nn.Modules as plain torch does, whatever the layout and the schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megacore.config import ParallelConfig, WatchConfig
from megacore.train.engine import PipelineEngine
from tests.distributed import run_distributed
from tests.parity.plain_models import ADAMW, MODELS, OPTIMIZER, SEED, Result, plain_torch
from tests.parity.runs import gather

STEPS = 4
TWICE = {"schedule": "interleaved", "virtual_stages": 2}
SPLIT, GPIPE = {"schedule": "zero-bubble"}, {"schedule": "gpipe"}
EVEN = {"pipeline_balance": "uniform"}
CAPTURED: dict[str, Any] = {"compile": True, "compile_backend": "aot-eager"}
Case = tuple[str, int, int, dict[str, Any]]  # model, pp, dp, changes

# In `make test` every model, schedule and ZeRO stage once, by the number of ranks.
CASES: dict[int, list[Case]] = {
    1: [("cnn", 1, 1, {}), ("tokens", 1, 1, SPLIT), ("bare", 1, 1, CAPTURED)],
    2: [
        ("cnn", 2, 1, TWICE),
        ("cnn", 1, 2, {"zero_stage": 3}),
        ("tokens", 2, 1, EVEN | SPLIT),
        ("tokens", 1, 2, {"zero_stage": 2}),
        ("bare", 2, 1, {}),
    ],
    4: [("bare", 4, 1, EVEN | SPLIT), ("tokens", 2, 2, SPLIT | {"zero_stage": 1})],
}
MORE: dict[int, list[Case]] = {
    2: [
        *((name, 2, 1, changes) for name in MODELS for changes in ({}, TWICE, EVEN | SPLIT)),
        ("cnn", 2, 1, GPIPE),
        ("cnn", 1, 2, {}),
        ("tokens", 1, 2, {"zero_stage": 1}),
    ],
    4: [
        *((name, 4, 1, EVEN | changes) for name in MODELS for changes in ({}, SPLIT)),
        *((name, 2, 2, SPLIT) for name in MODELS),
        ("cnn", 4, 1, EVEN | TWICE),
        ("cnn", 2, 2, TWICE | {"zero_stage": 3}),
        ("tokens", 2, 2, {"zero_stage": 2}),
        ("tokens", 2, 2, TWICE | {"zero_stage": 3}),
        ("tokens", 2, 2, SPLIT | {"zero_stage": 3}),
        ("bare", 2, 2, EVEN | {"zero_stage": 3}),
        ("bare", 2, 2, EVEN | SPLIT | {"zero_stage": 2}),
        ("cnn", 4, 1, EVEN | CAPTURED),
        ("tokens", 2, 2, SPLIT | CAPTURED),
    ],
}


def make_engine(case: Case) -> PipelineEngine:
    name, pp, dp, changes = case
    options = {name: value for name, value in changes.items() if name.startswith("compile")}
    parallel = {name: value for name, value in changes.items() if name not in options}
    model = MODELS[name]
    return PipelineEngine(
        model.layers,
        loss=model.loss,
        reduction=model.reduction,  # type: ignore[arg-type]
        count=model.count,
        parallel=ParallelConfig(**{"pp": pp, "dp": dp, "device": "cpu", "bucket_size_mb": 1e-3, **parallel}),
        optimizer=OPTIMIZER,
        optimizer_settings=ADAMW,
        num_microbatches=4 // dp,
        train_iters=STEPS,
        seed=SEED,
        watch=WatchConfig(hang_timeout_minutes=0.0),
        **options,
    )


def train(case: Case) -> Result:
    """Train on this rank; every rank returns what came out."""
    engine, model = make_engine(case), MODELS[case[0]]
    own = slice(engine.mesh.batch.rank, None, engine.mesh.batch.size)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        losses.append(float(engine.train_batch(model.batch(step)[own])))
        norms.append(float(engine.grad_norm))
        if step == 0:
            gradients = gather(engine, engine.mesh, lambda owned: owned.gradient)
    final = gather(engine, engine.mesh, lambda owned: owned.master)
    return Result(losses, norms, gradients, final, engine.evaluate(model.batch(STEPS)[own]))


def train_all(rank: int, world_size: int, cases: list[Case]) -> list[Result]:
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
def test_it_trains_as_plain_torch_does(world_size: int, cases: list[Case]) -> None:
    results = run_distributed(train_all, world_size, cases, timeout=240)[0]
    for (name, pp, dp, changes), found in zip(cases, results, strict=True):
        print(name, pp, dp, changes)  # shown where it fails
        expected = reference(name)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        assert found.gradients.keys() == expected.gradients.keys()
        for parameter, gradient in expected.gradients.items():
            error = (found.gradients[parameter] - gradient).abs().max()
            assert float(error) <= 1e-6 * max(1.0, float(gradient.abs().max())), parameter
            torch.testing.assert_close(found.final[parameter], expected.final[parameter], rtol=1e-5, atol=1e-6)
        if name != "cnn" or dp == 1:  # batch norm's running statistics are those of a replica
            assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-6)
