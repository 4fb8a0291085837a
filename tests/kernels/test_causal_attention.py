"""Causal attention by halves: against all scores in fp64, whatever the lengths, and without the scores above the
diagonal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.ops import causal_attention
from megacore.ops.causal_attention import attend_causally, attend_causally_backward
from tests.kernels.loop import with_all_weights

B, HEADS, D = 2, 4, 8


def drawn(queries: int, keys: int, groups: int) -> list[Tensor]:
    """Query, key, value and the gradient of the result, as the projections lay them out."""
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(B, length, heads, D) for length, heads in ((queries, HEADS), (keys, groups), (keys, groups))]
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in (*shapes, shapes[0])]


def exact(tensors: list[Tensor], offset: int) -> list[Tensor]:
    """Result, logarithms and the three gradients, with all weights, in fp64."""
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    positions = torch.arange(offset, offset + leaves[0].shape[2])[:, None]
    out, logarithms = with_all_weights(*leaves, seen=torch.arange(leaves[1].shape[2]) <= positions)
    return [out, logarithms, *torch.autograd.grad(out, leaves, tensors[3].double())]


def found_for(tensors: list[Tensor], offset: int) -> list[Tensor]:
    query, key, value, d_out = tensors
    out, logarithm = attend_causally((query, key, value), offset)
    return [out, logarithm, *attend_causally_backward(d_out, (query, key, value), out, logarithm, offset)]


# With blocks of 2 or more on the diagonal; 1 of them, 2, 3 and 4 levels, and lengths that halves do not divide.
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    ("queries", "keys", "offset"),
    [(2, 2, 0), (16, 16, 0), (32, 32, 0), (12, 12, 0), (14, 14, 0), (7, 7, 0), (8, 24, 16), (8, 24, 8), (8, 5, 0),
     (8, 8, 8), (8, 6, 20), (6, 20, 4)],
)  # fmt: skip
def test_halves_are_the_whole(
    queries: int, keys: int, offset: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_attention, "SMALLEST", 2)
    tensors = drawn(queries, keys, groups)
    for ours, wanted in zip(found_for(tensors, offset), exact(tensors, offset), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=2e-6)


def test_results_are_laid_out_as_the_projections_read_them() -> None:
    tensors = drawn(512, 512, 2)
    for x in (f for f in found_for(tensors, 0) if f.dim() == 4):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("length", [256, 768])
def test_few_scores_lie_above_the_diagonal(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counting(operator: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            query, key = arguments[-3:-1] if len(arguments) == 3 else arguments[1:3]
            computed.append(query.shape[0] * query.shape[2] * key.shape[2])
            return operator(*arguments, **options)

        return run

    for name in ("fused", "fused_backward"):
        monkeypatch.setattr(causal_attention, name, counting(getattr(causal_attention, name)))
    found_for([x[:1] for x in drawn(length, length, 1)], 0)
    # Of the blocks on the diagonal half, forward and backward.
    assert sum(computed) <= length * (length + 192)
    assert sum(computed) >= length * length


def test_a_later_key_changes_no_bit_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_attention, "SMALLEST", 2)
    before, after, at = drawn(16, 16, 2), drawn(16, 16, 2), 9
    for x in after[1:3]:
        x[:, :, at] = 1e4
    for one, other in zip(found_for(before, 0)[:3], found_for(after, 0)[:3], strict=True):  # results, and of queries
        assert torch.equal(one[:, :, :at], other[:, :, :at])
        assert not torch.equal(one[:, :, at], other[:, :, at])
