"""Floating-point operations of a training step, by the full-attention convention of Narayanan et al. 2021.

Their formula (arXiv 2104.04473, appendix), without recomputation and for an MLP four times the hidden size, is
72 B s L h^2 (1 + s / (6 h) + V / (12 h L)). The causal convention counts only the keys that a position sees, which
halves the attention term.
"""

from __future__ import annotations

from typing import Literal

from megacore.config import ResolvedModel

CONVENTION = "model FLOPs, full attention"
Attention = Literal["full", "causal"]


def flops_per_sequence(config: ResolvedModel, seq_length: int, *, attention: Attention = "full") -> float:
    """Forward and backward operations of one sequence; backward counts twice forward.

    Args:
        config: a resolved configuration.
        seq_length: s, tokens.
        attention: the convention.
    """
    forward = config.num_layers * block_flops(config, seq_length, attention=attention) + head_flops(config)
    return 3.0 * seq_length * forward


def block_flops(config: ResolvedModel, seq_length: int, *, attention: Attention = "full") -> float:
    """Operations of one block's forward for one token: its products, q k^T and the mix of v.

    With a window no more keys than it holds are counted; causal attention sees half of them where it holds all.
    """
    h, d, n = config.hidden_size, config.head_size, config.num_attention_heads
    projections = 2.0 * h * d * (2 * n + 2 * config.query_groups)
    keys = float(min(seq_length, config.window_size or seq_length))
    if attention == "causal":
        keys -= keys**2 / (2.0 * seq_length)
    mixing = 4.0 * keys * n * d
    return projections + mixing + 2.0 * (3 if config.gated else 2) * h * config.inner_size


def head_flops(config: ResolvedModel) -> float:
    """Operations of the output layer's forward for one token."""
    return 2.0 * config.hidden_size * config.vocab_size
