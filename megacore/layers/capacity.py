"""The capacity of experts: how many tokens of a sequence an expert takes, and which (Lepikhin et al. 2020, arXiv
2006.16668, section 2.2).

A sequence is the unit, and not a microbatch or what a rank holds: neither the micro-batch size nor any layout changes
which choices are dropped.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from megacore.config import ResolvedExperts


def capacity_of(experts: ResolvedExperts, length: int) -> int:
    """How many tokens of a sequence an expert takes: the capacity factor times the mean.

    Args:
        experts: with a capacity factor.
        length: of the sequence.
    """
    assert experts.moe_expert_capacity_factor is not None
    factor = Fraction(str(experts.moe_expert_capacity_factor))  # as it was written: rounded products end above integers
    return math.ceil(factor * experts.moe_router_topk * length / experts.num_experts)


def beyond_capacity(indices: Tensor, weights: Tensor, experts: ResolvedExperts, capacity: int) -> tuple[Tensor, Tensor]:
    """Which choices are dropped: an expert takes those with the largest weights, of equal ones the first, or those that
    come first.

    Args:
        indices: [b, S, k] int64, the experts of all tokens of each sequence; E for padding, which takes no place.
        weights: [b, S, k], of the choices.
        experts: says which of the two.
        capacity: of each expert, in tokens of a sequence.

    Returns:
        [b, S, k] bool; and by how much the smallest weight that a full expert takes exceeds the largest that it drops,
        at least, a scalar: infinite where none drops a choice, or drops by position.
    """
    flat = indices.flatten(1)  # [b, S k], in the order of positions
    if experts.moe_token_drop_policy == "probs":
        by_weight = torch.sort(weights.flatten(1), dim=1, descending=True, stable=True).indices
        order = by_weight.gather(1, torch.sort(flat.gather(1, by_weight), dim=1, stable=True).indices)
    else:
        order = torch.sort(flat, dim=1, stable=True).indices
    ordered = flat.gather(1, order)  # by expert
    counts = flat.new_zeros(len(flat), experts.num_experts + 1).scatter_add_(1, flat, torch.ones_like(flat))
    first = counts.cumsum(1) - counts  # of each expert
    number = torch.arange(flat.shape[1], device=flat.device) - first.gather(1, ordered)
    dropped = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order, number >= capacity)
    gap = weights.new_full((), torch.inf)
    if experts.moe_token_drop_policy == "probs":
        by_order = weights.flatten(1).gather(1, order)
        is_first_dropped = (number == capacity) & (ordered < experts.num_experts)
        steps = (by_order[:, :-1] - by_order[:, 1:]).masked_fill(~is_first_dropped[:, 1:], torch.inf)
        gap = steps.amin()
    return dropped.view_as(indices), gap
