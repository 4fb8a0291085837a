"""Floating-point operations of a training step, by the full-attention convention of Narayanan et al. 2021.

Their formula (arXiv 2104.04473, appendix), without recomputation and for an MLP four times the hidden size, is
72 B s L h^2 (1 + s / (6 h) + V / (12 h L)). The causal convention would halve the attention term.
"""

from __future__ import annotations

from megacore.config import ModelConfig, known

CONVENTION = "model FLOPs, full attention"

# Dense 16-bit matrix throughput in TFLOP/s by the name the driver reports.
PEAK_TFLOPS = {"V100": 125.0, "A100": 312.0, "H100": 989.0, "H200": 989.0}


def flops_per_sequence(config: ModelConfig, seq_length: int) -> float:
    """Forward and backward operations of one sequence; backward counts twice forward.

    Args:
        config: a resolved configuration.
        seq_length: s, tokens.
    """
    h, s = config.hidden_size, seq_length
    matmuls = 8 * h * h + 4 * h * known(config.ffn_hidden_size)  # per token and block: q, k, v, output; up, down
    attention = 4 * s * h  # per token and block: q k^T and the mix of v
    forward = config.num_layers * (matmuls + attention) + 2 * h * known(config.vocab_size)
    return 3.0 * s * forward


def peak_tflops(device_name: str) -> float | None:
    """The device's dense 16-bit peak in TFLOP/s, or None when it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)
