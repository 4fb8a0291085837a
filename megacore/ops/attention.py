"""Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1), in two implementations.

`sdpa` is torch's fused operator, which never writes the scores out. `fused-softmax` computes scores, their softmax and
the mix as three steps one can read; it keeps the weights, b x heads x s x s numbers, and knows masks that sdpa's fast
forms do not.
"""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from megacore.ops.checks import require
from megacore.ops.softmax import fused_softmax

Attention = Literal["auto", "sdpa", "fused-softmax"]


def resolved(implementation: Attention) -> Attention:
    """What `auto` stands for: sdpa, which is the faster one for every mask that the models have."""
    return "sdpa" if implementation == "auto" else implementation


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    implementation: Attention = "auto",
    window: int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v where no position sees a later one.

    Args:
        query: [b, heads, s, d]; any strides, the last dimension contiguous.
        key: [b, heads, s, d].
        value: [b, heads, s, d].
        dropout: probability on the attention weights; drawn from torch's default generator.
        implementation: which one.
        window: a position sees its last `window` positions alone; fused-softmax only.
        key_mask: [b, s] bool, False where a position is padding; fused-softmax only.

    Returns:
        [b, heads, s, d]

    Raises:
        ValueError: sdpa is asked for a mask that it does not have.
    """
    if implementation == "auto" and (window is not None or key_mask is not None):
        implementation = "fused-softmax"
    if resolved(implementation) == "sdpa":
        require(window is None and key_mask is None, "implementation is sdpa: a window or key_mask needs fused-softmax")
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    weights = fused_softmax(
        query @ key.transpose(-1, -2), scale=1.0 / math.sqrt(query.shape[-1]), causal=True, window=window,
        key_mask=key_mask,
    )  # fmt: skip
    return F.dropout(weights, dropout) @ value
