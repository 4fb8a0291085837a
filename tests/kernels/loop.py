"""What attention is compared with: a loop in double precision over who sees whom, and all weights at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megacore import ops

B, S, D = 2, 11, 8
# Two documents and padding at the end; padding between and at the front.
DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0], [0, 3, 3, 3, 0, 7, 7, 7, 7, 7, 0]])
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both ways": {"causal": False},
    "last four": {"causal": True, "window": 4},
    "last one": {"causal": True, "window": 1},
    "a window beyond the sequence": {"causal": True, "window": 50},
    "three on either side": {"causal": False, "window": 6},
    "three on either side, odd": {"causal": False, "window": 7},
    "documents": {"causal": True, "documents": DOCUMENTS},
    "documents both ways": {"causal": False, "documents": DOCUMENTS},
    "documents, window": {"causal": True, "documents": DOCUMENTS, "window": 2},
    "documents both ways, window": {"causal": False, "documents": DOCUMENTS.int(), "window": 2},
    "nothing but padding": {"causal": True, "documents": torch.zeros_like(DOCUMENTS)},
}


def brute_force(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, window: int | None = None,
    documents: Tensor | None = None, slopes: list[float] | None = None,
) -> Tensor:  # fmt: skip
    """Position by position."""
    shared_by, out = query.shape[1] // key.shape[1], 0.0 * query
    samples, heads, length, size = query.shape
    for b in range(samples):
        for head in range(heads):
            k, v = key[b, head // shared_by], value[b, head // shared_by]
            for i in range(length):
                seen = []
                for j in range(length):
                    near = window is None or (i - j < window if causal else abs(i - j) <= window // 2)
                    same = documents is None or (documents[b, i] == documents[b, j] and documents[b, i] != 0)
                    if near and same and not (causal and j > i):
                        seen.append(j)
                if seen:
                    scores = k[seen] @ query[b, head, i] / math.sqrt(size)
                    if slopes is not None:
                        scores = scores - slopes[head] * torch.tensor([abs(i - j) for j in seen], dtype=scores.dtype)
                    out[b, head, i] = torch.softmax(scores, 0) @ v[seen]
    return out


def drawn(groups: int, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values, laid out as the projection leaves them: [b, s, heads, d], transposed."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(B, S, count, D) for count in (heads, groups, groups)]
    return [2.0 * torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def with_all_weights(
    query: Tensor, key: Tensor, value: Tensor, *, seen: Tensor | None = None, slopes: Tensor | None = None,
    cap: float | None = None, left: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(cap tanh(q k^T / sqrt(d) / cap) + bias) v, where `left` is what dropout leaves of the weights, and
    exp(sinks), [n], join the denominators; and these denominators' logarithms without them."""
    times = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(times, 1).transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    if slopes is not None:
        positions = torch.arange(query.shape[2], device=query.device)
        scores = scores - slopes.to(query)[:, None, None] * (positions[:, None] - positions).abs()
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    column = scores[..., :0] if sinks is None else sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., : scores.shape[-1]]
    weights = weights if left is None else weights * left
    return weights @ value.repeat_interleave(times, 1), scores.logsumexp(-1)


@cache
def _looped(case: str, groups: int, alibi: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loop's result for `drawn(groups)`, and the gradients for the outer one of `is_the_loop`."""
    exact = [x.double().requires_grad_() for x in drawn(groups)]
    expected = brute_force(*exact, **CASES[case], slopes=ops.alibi_slopes(4) if alibi else None)
    wanted = torch.autograd.grad((expected * outer(expected)).sum(), exact, allow_unused=True)
    return expected.detach(), tuple(
        torch.zeros_like(x) if want is None else want for x, want in zip(exact, wanted, strict=True)
    )


def outer(result: Tensor) -> Tensor:
    """A gradient of the result."""
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(6)).to(result.device)


def is_the_loop(found: Tensor, ours: Sequence[Tensor], case: str, *, alibi: bool = False) -> None:
    """What was found for `drawn(groups)`, which are `ours`, is the loop's, and so are its gradients."""
    expected, wanted = _looped(case, ours[1].shape[1], alibi)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    gradients_are(found, ours, wanted)


def gradients_are(found: Tensor, ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for gradient, want in zip(torch.autograd.grad((found * outer(found)).sum(), ours), wanted, strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-5)
