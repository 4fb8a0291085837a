"""Linear layers that write the gradients of their weights into fp32 sums give autograd's numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.parallel.tensor import ColumnParallelLinear


class Sum:
    """A sum in memory that holds something else at first."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total, self.terms = torch.full(shape, torch.nan), 0

    def buffer(self) -> tuple[Tensor, bool]:
        return self.total, self.terms > 0

    def added(self) -> None:
        self.terms += 1


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_in_fp32_have_the_bits_of_autograds(split_backward: bool, bias: bool) -> None:
    torch.manual_seed(1)
    layer = ColumnParallelLinear(48, 80, bias=bias, split_backward=split_backward)
    values, offsets = torch.randn(80, 48), torch.randn(80)
    layer.weight = ShardedParameter(values.clone(), ShardSpec(shape=(80, 48)))
    layer.weight.gradient_sum = into = Sum((80, 48))
    if layer.bias is not None:
        layer.bias.data = offsets.clone()
    plain = values.clone().requires_grad_()
    plain_bias = offsets.clone().requires_grad_() if bias else None
    for microbatch in range(2):
        x = torch.randn(3, 33, 48)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        grad = torch.randn(3, 33, 80)
        y, expected = layer(ours), F.linear(theirs, plain, plain_bias)
        assert torch.equal(y, expected)
        y.backward(grad)
        expected.backward(grad)
        assert ours.grad is not None and theirs.grad is not None and plain.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        assert layer.weight.grad is None and into.terms == microbatch + 1
        assert torch.equal(into.total, plain.grad)
    if layer.bias is not None and plain_bias is not None:
        assert layer.bias.grad is not None and plain_bias.grad is not None
        assert torch.equal(layer.bias.grad, plain_bias.grad)
