"""One rank of four is started differently, in each of many ways: every rank refuses at launch, names it, and none
hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacore.config import AdamWConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, ResolvedConfig
from megacore.errors import ConfigError
from megacore.parallel.mesh import build_mesh
from megacore.train.engine import Layer, PipelineEngine
from megacore.train.same_run import refuse_different_ranks
from tests.distributed import run_distributed
from tests.parity.runs import make_config

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("optimizer", {"lr": 2e-3}, "--lr 0.002, {others}: 0.001"),
    ("training", {"seed": 7}, "--seed 7, {others}: 1234"),
    ("training", {"global_batch_size": 16}, "--global-batch-size 16, {others}: 8"),
    ("parallel", {"tp": 2}, "--tp 2, {others}: 1"),
    ("data", {"split": "1,0,0"}, "--split 1,0,0, {others}: 949,50,1"),
]


def in_environment(**variables: str) -> Callable[[], Any]:
    return lambda: mock.patch.dict(os.environ, variables)


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def without_flash() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)


SURROUNDINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: mock.patch.object(torch, "__version__", "2.0.0"), "version of torch 2.0.0, {others}: "),
    (in_environment(NCCL_ALGO="Tree"), "environment variable NCCL_ALGO Tree, {others}: not set"),
    (in_tf32, "torch.backends.cuda.matmul.fp32_precision tf32, {others}: ieee"),
    (without_flash, "torch.backends.cuda.flash_sdp_enabled False, {others}: True"),
]


def refused(config: ResolvedConfig, rank: int) -> str:
    mesh_world = build_mesh(ParallelConfig(dp=4, device="cpu")).world
    with pytest.raises(ConfigError) as error:
        refuse_different_ranks(config, mesh_world)
    return str(error.value)


def started_differently(rank: int, world_size: int, base: ResolvedConfig) -> list[tuple[int, str, str]]:
    """Which rank differed, what must be said of it, and what was said on this rank; for each way to differ."""
    ways: list[tuple[str, dict[str, Any], Callable[[], Any], str]] = [
        *((section, values, contextlib.nullcontext, text) for section, values, text in SETTINGS),
        *(("data", {}, surroundings, text) for surroundings, text in SURROUNDINGS),
    ]
    found = []
    for number, (section, values, surroundings, text) in enumerate(ways):
        odd = number % world_size
        config = base
        around: Callable[[], Any] = contextlib.nullcontext
        if rank == odd:
            config = dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **values)})
            around = surroundings
        with around():
            found.append((odd, text, refused(config, rank)))
    refuse_different_ranks(base, build_mesh(base.parallel).world)  # equal ranks are accepted
    return found


def test_every_key_that_differs_on_one_rank_is_named_at_launch(tmp_path: Path) -> None:
    base = make_config((1, 1, 4), tmp_path / "out")
    base = dataclasses.replace(base, training=dataclasses.replace(base.training, micro_batch_size=2))
    ranks = run_distributed(started_differently, 4, base)
    assert len(ranks[0]) == len(SETTINGS) + len(SURROUNDINGS)
    for number, (odd, text, said) in enumerate(ranks[0]):
        assert all(other[number][2] == said for other in ranks), "the same on every rank"
        others = [rank for rank in range(4) if rank != odd]
        named = f"ranks {others[0]} to {others[-1]}" if odd in (0, 3) else f"ranks {', '.join(map(str, others))}"
        (line,) = (line for line in said.splitlines() if text.format(others=named) in line)
        assert line.startswith(f"  - rank {odd} (pp 0, dp {odd}, tp 0): "), line
        assert len(said.splitlines()) <= 3, said


LAYERS: dict[str, Any] = {"layers": [Layer("a", nn.Linear, 6, 6), Layer("drop", nn.Dropout, 0.1)], "loss": F.mse_loss}
ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": OptimizerConfig(lr=2e-3, min_lr=1e-4)}, "--lr 0.002, {others}: 0.001"),
    ({"optimizer_settings": AdamWConfig(adam_eps=1e-6)}, "--optimizer eps=1e-06, {others}: 1e-08"),
    ({"precision": PrecisionConfig(precision="bf16")}, "--precision bf16, {others}: fp32"),
    ({"seed": 5}, "--seed 5, {others}: 1234"),
    ({"parallel": ParallelConfig(dp=3, zero_stage=2, device="cpu")}, "--zero-stage 2, {others}: 0"),
    ({"num_microbatches": 2}, "--global-batch-size 6, {others}: 3"),
    ({"reduction": "sum"}, "reduction sum, {others}: mean"),
    ({"loss": F.l1_loss}, "loss l1_loss, {others}: mse_loss"),
    ({"count": len}, "count len, {others}: NoneType"),
    (
        {"layers": [LAYERS["layers"][0], Layer("drop", nn.Dropout, 0.2)]},
        "module of layer 'drop' Dropout(0.2), {others}: Dropout(0.1)",
    ),
]


def engines_made_differently(rank: int, world_size: int) -> list[str]:
    usual = LAYERS | {"train_iters": 4, "optimizer": OptimizerConfig(lr=1e-3, min_lr=1e-4)}
    usual["parallel"] = ParallelConfig(dp=3, device="cpu")
    said = []
    for number, (changes, _) in enumerate(ENGINES):
        with pytest.raises(ConfigError) as error:
            PipelineEngine(**usual | (changes if rank == number % world_size else {}))
        said.append(str(error.value))
    PipelineEngine(**usual)
    return said


def test_an_engine_that_is_made_differently_on_one_rank_is_refused() -> None:
    ranks = run_distributed(engines_made_differently, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    for number, ((_, text), said) in enumerate(zip(ENGINES, ranks[0], strict=True)):
        odd = number % 3
        one, other = (rank for rank in range(3) if rank != odd)
        assert said.startswith(
            f"  - rank {odd} (pp 0, dp {odd}, tp 0): {text.format(others=f'ranks {one}, {other}')}\n"
        )
        assert len(said.splitlines()) == 2, said
