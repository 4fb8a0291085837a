"""Products of linear layers and look-ups of tables: every product passes through the `Products` of the build context,
once, and rows are added to the sum of a table's gradient, bitwise as the dense gradient was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel import tensor
from megacore.parallel.mesh import build_mesh
from megacore.parallel.products import Products, add_rows
from megacore.parallel.sharding import ShardedParameter
from tests.distributed import run_distributed
from tests.parity.runs import Layout, bitwise, make_config, make_trainer, train_on

GATED: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "disable_bias_linear": True}
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
SPLIT: dict[str, Any] = {"schedule": "zero-bubble"}
KINDS = ("output", "input_gradient", "weight_gradient")


class CountedProducts(Products):
    """Counts what is asked of it: a strategy as anybody may write one."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["output"] += 1
        return super().output(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        self.calls["input_gradient"] += 1
        return super().input_gradient(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        self.calls["weight_gradient"] += 1
        return super().weight_gradient(grad, x)


@dataclass(frozen=True)
class Counted:
    """Two steps of one variant: calls, their number by formula, losses with the counter and without."""

    calls: dict[str, int]
    expected: dict[str, int]
    losses: list[float]
    plain: list[float]


def counted(rank: int, size: int, layout: Layout, directory: str, variants: list[dict[str, Any]]) -> list[Counted]:
    """Train every variant with the counter and without."""
    outcomes = []
    for changes in variants:
        config = make_config(layout, directory, train_iters=2, num_layers=2, micro_batch_size=4, **changes)
        mesh, products = build_mesh(config.parallel), CountedProducts()
        counting, plain = make_trainer(config, mesh, products=products), make_trainer(config, mesh)
        losses = [[float(t.train_step(next(t.batches)).loss) for _ in range(2)] for t in (counting, plain)]
        microbatches = config.training.global_batch_size // config.training.micro_batch_size
        linears = config.model.num_layers * (5 if config.model.gated else 4) + 1  # qkv, output, gate, up, down; head
        expected = dict.fromkeys(KINDS, 2 * microbatches * linears)
        outcomes.append(Counted(dict(products.calls), expected, *losses))
    return outcomes


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_product_is_asked_for_once(tp: int, tmp_path: Path) -> None:
    variants = [{}, GATED, SPLIT, GATED | SPLIT]
    if tp > 1:
        variants += [SEQUENCE | GATED, SEQUENCE | SPLIT]
    for outcomes in run_distributed(counted, tp, (tp, 1, 1), str(tmp_path), variants):
        for outcome in outcomes:
            assert outcome.calls == outcome.expected
            assert outcome.losses == pytest.approx(outcome.plain, rel=1e-6)


# ---- look-ups

UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True, "train_iters": 2, "num_layers": 2}


@pytest.mark.parametrize(
    ("rows", "tokens", "dtype", "sum_dtype"),
    [
        (50, 64, torch.float32, torch.float32),
        (5, 100, torch.bfloat16, torch.float32),
        (300, 1000, torch.bfloat16, torch.bfloat16),
        (7, 1, torch.float16, torch.float32),
    ],
)
def test_rows_are_added_as_a_dense_gradient_is(
    rows: int, tokens: int, dtype: torch.dtype, sum_dtype: torch.dtype
) -> None:
    numbers = torch.Generator().manual_seed(3)
    table = torch.zeros(rows, 8, dtype=dtype, requires_grad=True)
    total, expected = torch.full((rows, 8), torch.nan, dtype=sum_dtype), torch.zeros(rows, 8, dtype=sum_dtype)
    for microbatch in range(3):
        read = torch.randint(rows, (1, tokens), generator=numbers)
        grad = torch.randn(1, tokens, 8, generator=numbers).to(dtype)
        expected += torch.autograd.grad(F.embedding(read, table), table, grad)[0]
        add_rows(total, read, grad, has_terms=microbatch > 0)
    assert torch.equal(total, expected)


class Dense:
    """A look-up whose gradient is dense; counts the tables that have a sum."""

    def __init__(self) -> None:
        self.with_sum = 0

    def __call__(self, tokens: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        self.with_sum += weight.gradient_sum is not None
        return F.embedding(tokens, weight)


def both_ways(rank: int, size: int, layout: Layout, directory: str, variants: list[dict[str, Any]]) -> list[int]:
    """Train every variant with sums of rows and with dense gradients; how many look-ups could add rows."""
    counts = []
    for changes in variants:
        config, dense = make_config(layout, directory, **UNTIED | changes), Dense()
        mesh = build_mesh(config.parallel)
        rows = train_on(mesh, config)
        with patch.object(tensor, "looked_up", dense):
            expected = train_on(mesh, config)
        bitwise(rows, expected)
        counts.append(dense.with_sum)
    return counts


ZERO = [{"zero_stage": stage} for stage in (0, 2, 3)]
BF16 = {"precision": "bf16"}
TIED = {"untie_embeddings_and_output_weights": False}


@pytest.mark.parametrize(
    ("layout", "variants"),
    [
        ((1, 1, 2), [{"zero_stage": 1}, BF16 | {"grad_reduce_dtype": "bf16"}]),
        *(
            pytest.param(layout, variants, marks=pytest.mark.slow)
            for layout, variants in [
                ((1, 1, 1), [{}, {"micro_batch_size": 1}, BF16, {"optimizer": "muon", "micro_batch_size": 1}]),
                ((1, 2, 1), [{"schedule": "zero-bubble"}, TIED]),
                ((1, 1, 2), ZERO),
                ((1, 2, 2), [{"schedule": "zero-bubble", "zero_stage": 1}, {"precision": "fp16"}]),
                ((2, 1, 2), [{"sequence_parallel": True, "zero_stage": 3}]),
            ]
        ),
    ],
    ids=str,
)
def test_training_is_bitwise_that_with_dense_gradients(
    layout: Layout, variants: list[dict[str, Any]], tmp_path: Path
) -> None:
    tp, pp, dp = layout
    first, *_ = run_distributed(both_ways, tp * pp * dp, layout, str(tmp_path), variants, stay=True)
    assert all(first)
