"""How many parameters each layer of a causal language model has, before any of it exists.

Stages are balanced by these numbers, and the launch summary prints them; tests compare them with the parameters that
are built, and the sums with the published ones.

Legend: h hidden size, n heads of d dimensions, g key and value heads, f inner width of the MLP, V vocabulary.
"""

from __future__ import annotations

from megacore.config import ModelConfig, known


def embedding_parameters(config: ModelConfig) -> int:
    """Token table V h, a norm, a position table."""
    table = known(config.vocab_size) * config.hidden_size
    norm = norm_parameters(config) if config.embedding_layernorm else 0
    learned = config.position_embedding_type == "learned"
    return table + norm + (known(config.max_position_embeddings) * config.hidden_size if learned else 0)


def block_parameters(config: ModelConfig) -> int:
    """Attention h d (2 n + 2 g), MLP 2 h f or, gated, 3 h f; biases; two norms."""
    h, d, f = config.hidden_size, config.head_size, config.inner_size
    query, projected = config.num_attention_heads * d, (config.num_attention_heads + 2 * config.query_groups) * d
    into = 2 if config.gated else 1  # matrices that lead into the MLP's inner width
    weights = h * projected + query * h + (into + 1) * h * f
    biases = 0 if config.disable_bias_linear else h + into * f + h
    biases += projected if config.qkv_bias else 0
    head_norms = 2 * norm_parameters(config, d) if config.qk_layernorm else 0
    return weights + biases + head_norms + 2 * norm_parameters(config)


def head_parameters(config: ModelConfig) -> int:
    """Final norm and output layer, which a tied model shares with the embedding."""
    return known(config.vocab_size) * config.hidden_size + norm_parameters(config)


def norm_parameters(config: ModelConfig, size: int | None = None) -> int:
    """A weight for each dimension, and a bias where LayerNorm has one."""
    has_bias = config.normalization == "LayerNorm" and config.norm_bias
    return (size or config.hidden_size) * (2 if has_bias else 1)
