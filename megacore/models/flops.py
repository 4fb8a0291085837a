"""Floating-point operations of a training step, by the full-attention convention of Narayanan et al. 2021 (arXiv
2104.04473, appendix): for an MLP four times the hidden size 72 B s L h^2 (1 + s / (6 h) + V / (12 h L)), without
recomputation. The causal convention counts only the keys that a position sees, which halves the attention term."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Literal

from megacore.config import LoraConfig, ResolvedModel
from megacore.config.layer_pattern import LINEAR, MAMBA, WINDOW, WITHOUT_POSITIONS
from megacore.config.lora import adapter_parameters
from megacore.models.size import active_parameters, attention_matrices, block_parameters, short_matrices

CONVENTION = "model FLOPs, full attention"
Attention = Literal["full", "causal"]


def flops_per_sequence(config: ResolvedModel, seq_length: int, *, attention: Attention = "full") -> float:
    """Forward and backward operations of one sequence; backward counts twice forward."""
    blocks = blocks_of(config)
    forward = sum(number * block_flops(block, seq_length, attention=attention) for block, number in blocks)
    return 3.0 * seq_length * (forward + config.mtp_num_layers * join_flops(config) + head_flops(config))


def adapted_flops_per_sequence(config: ResolvedModel, seq_length: int, lora: LoraConfig) -> float:
    """The same of a run that trains adapters: frozen weights have no gradient, which is a third of their operations."""
    frozen = sum(number * block_flops(block, 0) for block, number in blocks_of(config)) + head_flops(config)
    adapters = 6.0 * config.num_layers * adapter_parameters(lora, config, 1)
    return flops_per_sequence(config, seq_length) + seq_length * (adapters - frozen)


@functools.lru_cache(maxsize=16)
def blocks_of(config: ResolvedModel) -> tuple[tuple[ResolvedModel, int], ...]:
    """The kinds of blocks of a causal language model, by experts and attention, and how many there are of each."""
    kinds = Counter(
        (config.experts is None or config.experts.holds(i), letter) for i, letter in enumerate(config.attention_kinds)
    )
    last = config.experts is None or config.experts.holds(config.num_layers - 1), config.attention_kinds[-1]
    kinds[last] += config.mtp_num_layers
    return tuple(
        (block_of_kind(config if has_experts else without_experts(config), letter), number)
        for (has_experts, letter), number in kinds.items()
    )


def idle_parameters(config: ResolvedModel) -> int:
    """Parameters of the experts that a token does not choose."""
    return sum(number * (block_parameters(block) - active_parameters(block)) for block, number in blocks_of(config))


def block_of_kind(config: ResolvedModel, kind: str) -> ResolvedModel:
    """The configuration with the attention of one block, by its letter of --layer-pattern."""
    if config.layer_pattern is None or kind == WINDOW:
        return config
    full = without_window(config)
    if kind in (LINEAR, MAMBA):
        return dataclasses.replace(full, layer_pattern=kind, position_embedding_type="none")
    return dataclasses.replace(full, position_embedding_type="none") if kind == WITHOUT_POSITIONS else full


@functools.lru_cache(maxsize=16)  # one object for all blocks that are alike
def without_window(config: ResolvedModel) -> ResolvedModel:
    """The configuration of a block that sees the whole sequence."""
    return dataclasses.replace(config, window_size=None)


@functools.lru_cache(maxsize=16)  # one object for all blocks that are alike
def without_experts(config: ResolvedModel) -> ResolvedModel:
    """The configuration of a block that keeps its feed-forward layer."""
    return dataclasses.replace(config, experts=None)


def block_flops(config: ResolvedModel, seq_length: int, *, attention: Attention = "full") -> float:
    """Operations of one block's forward for one token: its products, q k^T and the mix of v. With a window no more keys
    than it holds are counted; causal attention sees half of them where it holds all. Linear attention writes its state,
    and reads it twice, Mamba-2 once."""
    h, n = config.hidden_size, config.num_attention_heads
    matrices = (*attention_matrices(config).values(), *short_matrices(config))
    projections = 2.0 * sum(rows * columns for rows, columns in matrices)
    keys = float(min(seq_length, config.window_size or seq_length))
    if attention == "causal":
        keys -= keys**2 / (2.0 * seq_length)
    mixing = 2.0 * keys * n * (config.head_size + config.value_size)
    if config.is_linear:
        mixing = linear_flops(config)
    inner, router = config.inner_size, 0.0
    if config.experts is not None:
        inner, router = config.experts.active_inner_size, 2.0 * h * config.experts.num_experts
    return projections + mixing + 2.0 * (3 if config.gated else 2) * h * inner + router


def linear_flops(config: ResolvedModel) -> float:
    """Operations of linear attention between its projections for one token."""
    features, values = config.linear_widths
    mixing = (4.0 if config.is_mamba else 6.0) * values * config.linear_key_head_dim
    return mixing + 2.0 * (2 * features + values) * config.linear_conv_kernel_dim


def head_flops(config: ResolvedModel) -> float:
    """Operations of the output layer's forward for one token, whose later tokens it predicts too."""
    return 2.0 * config.hidden_size * config.vocab_size * (1 + config.mtp_num_layers)


def join_flops(config: ResolvedModel) -> float:
    """Operations that a block of multi-token prediction has besides those of a block: of 2 h values it makes h."""
    return 4.0 * config.hidden_size**2
