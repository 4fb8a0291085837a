"""The gated delta rule, and the recurrence of Mamba-2, computed in chunks, are what they say, position by position."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore import ops

# Several chunks, the last one not full. Documents begin in the middle and at both sides of edges of chunks.
B, HEADS, S, KEY, VALUE = 2, 3, 150, 8, 6
STARTS = torch.zeros(B, S, dtype=torch.bool)
STARTS[0, [5, 63, 64, 100]] = STARTS[1, [0, 30, 127, 149]] = True


def in_chunks(operands: list[Tensor], starts: Tensor | None, corrects: bool) -> tuple[Tensor, Tensor]:
    query, key, value, *rates, rate = operands[:5]
    before = (lambda made: operands[5]) if operands[5:] else None
    return ops.gated_delta_rule(
        query, key, value, decay=rates[0], rate=rate, starts=starts, before=before, corrects=corrects
    )


def position_by_position(operands: list[Tensor], starts: Tensor | None, corrects: bool) -> tuple[Tensor, Tensor]:
    query, key, value, decay, rate, *states = operands
    state, read = states[0] if states else query.new_zeros(B, HEADS, KEY, VALUE), []
    for t in range(S):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None, None, None], 0.0)
        k, b = key[:, :, t].unsqueeze(-1), rate[:, :, t, None, None]
        kept = state - b * k @ (k.mT @ state) if corrects else state
        state = decay[:, :, t, None, None].exp() * kept + b * k @ value[:, :, t : t + 1]
        read.append(state.mT @ query[:, :, t].unsqueeze(-1))
    return torch.stack(read, 2).squeeze(-1), state


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one document", "documents"])
@pytest.mark.parametrize("states", [0, 1], ids=["from the first position", "after others"])
@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "mamba 2"])
def test_chunks_are_the_recurrence_in_double_precision(starts: Tensor | None, states: int, corrects: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(S, VALUE), (KEY, VALUE), (S, KEY), (S, KEY), (S, VALUE), (S,), (S,), *[(KEY, VALUE)] * states]
    drawn = [torch.randn(B, HEADS, *size, generator=generator, dtype=torch.float64) for size in sizes]
    *weights, query, key, value, decay, rate = drawn[:7]
    decay = -0.1 * decay.exp()
    decay[:, :, 70] = -100.0  # forgets all: the inverse is too large for fp32
    exact, results = [query, F.normalize(key, dim=-1), value, decay, rate.sigmoid(), *drawn[7:]], []
    for compute, dtype in ((position_by_position, torch.float64), (in_chunks, torch.float32)):
        operands = [x.to(dtype).requires_grad_() for x in exact]
        made = compute(operands, starts, corrects)
        total = torch.stack([(x * weight).sum() for x, weight in zip(made, weights, strict=True)]).sum()
        results.append([*made, *torch.autograd.grad(total, operands)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-6 * expected.norm()
