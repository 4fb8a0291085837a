"""What attention holds at 8192 positions on a device without a fused operator: it grows with s, not with s x s."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megacore import ops
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed

pytestmark = needs_pretend
HEADS, GROUPS, SIZE, BLOCK = 2, 1, 16, 512


@dataclass(frozen=True)
class Peak:
    """Bytes beyond queries, keys and values: most at once in a forward and a backward, and what is kept in between."""

    peak: int
    kept: int


def peaks(rank: int, world_size: int, case: str, lengths: list[int]) -> list[Peak]:
    device = torch.device("pretend", rank)
    found = []
    for s in lengths:
        query, key, value = (
            torch.randn(1, s, heads, SIZE, device=device).transpose(1, 2).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        )
        documents = (torch.arange(s) // (s // 3) + 1).view(1, s).to(device) if case == "documents" else None
        alibi = ops.Alibi(torch.tensor(ops.alibi_slopes(HEADS), device=device)) if case == "alibi" else None
        window = s // 4 if case == "window" else None
        outer = torch.ones(1, HEADS, s, SIZE, device=device)
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        out = ops.attention(query, key, value, causal=True, window=window, documents=documents, alibi=alibi)
        kept = torch.accelerator.memory_allocated(device) - before
        out.backward(outer)
        found.append(Peak(torch.accelerator.max_memory_allocated(device) - before, kept))
        del query, key, value, documents, alibi, outer, out
    return found


@pytest.mark.parametrize(
    "case", ["documents", *(pytest.param(case, marks=pytest.mark.slow) for case in ("window", "alibi"))]
)
def test_attention_at_8192_holds_tiles_and_what_grows_with_the_length(case: str) -> None:
    """Half the length: half of all but the tiles."""
    half, whole = run_distributed(peaks, 1, case, [4096, 8192], backend="pretend", init=False)[0]
    out, logarithms = 4 * 8192 * HEADS * SIZE, 4 * 8192 * HEADS
    rows = 4 * 8192 * (2 * HEADS + 2 * GROUPS) * SIZE  # the result, and the gradients of queries, keys and values
    masked = out if case == "documents" else 0  # what the result of padding is taken from
    assert whole.kept <= 1.01 * (out + logarithms + masked + (8192 if case == "documents" else 0)) + 4096
    tile = 4 * HEADS * BLOCK**2
    assert whole.peak <= 2 * rows + 8 * tile
    assert whole.peak - half.peak <= rows  # of the half that is more
    assert whole.peak < 4 * HEADS * 8192**2 // 16, "less than a sixteenth of one head's weights for each head"
