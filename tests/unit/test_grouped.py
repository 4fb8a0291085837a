"""Products of the rows of many experts at once: torch's operator for them against a loop of products, and the tables
that kernels read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacore.ops.grouped import RowGroups, grouped_implementation
from megacore.parallel import experts
from megacore.parallel.experts import GroupedProducts
from megacore.parallel.products import TORCH, Products
from megacore.parallel.sharding import ShardedParameter, ShardSpec

COUNTS = [(3, 0, 5, 1), (0, 0, 0), (0, 7), (4,)]


class Sum:
    """Where gradients are added, as ZeRO's buckets do."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.terms = total, 0

    def buffer(self) -> tuple[Tensor, bool]:
        return self.total, self.terms > 0

    def added(self) -> None:
        self.terms += 1


def results(counts: tuple[int, ...], dtype: torch.dtype, *, sums: bool) -> list[Tensor]:
    """Output and gradients of a layer; with `sums` the weight's after two passes, in fp32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 16, generator=generator).to(dtype).requires_grad_()
    shape = (len(counts), 24, 16)
    weight = ShardedParameter(torch.randn(shape, generator=generator).to(dtype), ShardSpec(shape=shape))
    total = Sum(torch.full(shape, torch.nan))
    weight.gradient_sum = total if sums else None
    grad = torch.randn(sum(counts), 24, generator=generator).to(dtype)
    for _ in range(2 if sums else 1):
        y = GroupedProducts(TORCH, RowGroups(counts)).linear(x, weight)
        y.backward(grad)
    assert x.grad is not None
    of_weight = total.total if sums else weight.grad
    assert of_weight is not None
    return [y.detach(), x.grad, of_weight]


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_torchs_grouped_product_is_the_loop(
    counts: tuple[int, ...], sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts without rows get gradients of zero, also where no expert has any."""
    expected = results(counts, torch.float32, sums=False)
    if sums:
        expected[1:] = [2 * gradient for gradient in expected[1:]]
    monkeypatch.setattr(experts, "grouped_implementation", lambda x, inputs, outputs: "grouped_mm")
    for one, other in zip(results(counts, torch.float32, sums=sums), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    of_idle = [expert for expert, count in enumerate(counts) if count == 0]
    assert not expected[2][of_idle].any()


def test_a_cpu_and_other_products_take_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grouped_implementation(torch.zeros(2, 16, dtype=torch.bfloat16), 16, 24) == "loop"

    class Doubled(Products):
        """As FP8 would be: each expert's product is its own."""

        def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return 2 * super().output(x, weight, bias)

    monkeypatch.setattr(experts, "grouped_implementation", lambda x, inputs, outputs: "grouped_mm")
    x, weight = torch.randn(5, 16), torch.randn(2, 24, 16)
    y = GroupedProducts(Doubled(), RowGroups((2, 3))).output(x, weight, None)
    torch.testing.assert_close(y, 2 * torch.cat([x[:2] @ weight[0].t(), x[2:] @ weight[1].t()]))
