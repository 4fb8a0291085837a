"""Every product of a linear layer passes through the `Products` of the build context, and passes through it once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megacore.parallel.mesh import build_mesh
from megacore.parallel.products import Products
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

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


@pytest.mark.parametrize("tp", [1, 2])
def test_every_product_is_asked_for_once(tp: int, tmp_path: Path) -> None:
    variants = [{}, GATED, SPLIT, GATED | SPLIT]
    if tp > 1:
        variants += [SEQUENCE | GATED, SEQUENCE | SPLIT]
    for outcomes in run_distributed(counted, tp, (tp, 1, 1), str(tmp_path), variants):
        for outcome in outcomes:
            assert outcome.calls == outcome.expected
            assert outcome.losses == pytest.approx(outcome.plain, rel=1e-6)
