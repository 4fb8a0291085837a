"""Soft caps of scores and logits (Gemma team 2024, arXiv 2408.00118, section 2): c tanh(x / c), which stays between -c
and c and is nearly x where x is small."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap). `x`: any tensor of real numbers. `cap`: c, above 0."""
    return torch.tanh(x / cap) * cap


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """`soft_capped`, written over x, which autograd does not watch."""
    return x.div_(cap).tanh_().mul_(cap)


def soft_cap_slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative of `soft_capped`, from its result: 1 - (capped / cap)^2. `capped`: what `soft_capped` gave."""
    return (capped / cap).square_().neg_().add_(1.0)
