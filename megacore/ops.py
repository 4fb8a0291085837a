"""The operators a layer is made of, and the one place that decides which implementation of each runs.

Today every operator has its plain-torch form; a Triton form is chosen here, and here only, once `megacore.kernels`
has it. `implementations()` says what runs, for the launch summary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016, arXiv 1607.06450).

    Args:
        x: [..., h].
        weight: [h].
        bias: [h].
        epsilon: added to the variance.
    """
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as GPT-2 uses it (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(d)) v where no position sees a later one.

    Args:
        query: [b, heads, s, d]; any strides, the last dimension contiguous.
        key: [b, heads, s, d].
        value: [b, heads, s, d].
        dropout: probability on the attention weights; drawn from torch's default generator.

    Returns:
        [b, heads, s, d]
    """
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


def implementations() -> dict[str, str]:
    """Which implementation each operator runs, in the order of a block."""
    return {"layer_norm": "torch", "attention": "torch sdpa", "gelu": "torch", "cross_entropy": "torch"}
