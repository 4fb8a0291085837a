"""Logits, the largest tensor of a small model: how many bytes they take, and in how many chunks they are computed."""

from __future__ import annotations

import math

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.model import padded_rows
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.reproducible import canonical_blocks

MOST_LOGITS = 2.0**31
"""Bytes of logits that exist at a time, unless --loss-chunks says otherwise."""


def logits_bytes(config: ResolvedConfig) -> float:
    """All logits of a microbatch on a rank, [b, s, padded V/t], over which the loss writes their gradient."""
    tokens = config.training.micro_batch_size * config.rank_positions
    layer, model = ranks_of_role("layer", config.parallel), config.model
    rows = padded_rows(model.vocab_size, layer, model.make_vocab_size_divisible_by)
    return ELEMENT_BYTES[config.precision.precision] * tokens * rows


def loss_chunks(config: ResolvedConfig) -> int:
    """In how many chunks of the tokens the head computes its logits: what --loss-chunks says, or the fewest that keep
    them within `MOST_LOGITS`."""
    size = logits_bytes(config)
    if canonical_blocks(config) > 1:  # the layout must not say where sums over tokens are cut
        model, tokens = config.model, config.training.micro_batch_size * config.data.seq_length
        size = ELEMENT_BYTES[config.precision.precision] * tokens * float(model.vocab_size)
    return config.training.loss_chunks or max(1, math.ceil(size / MOST_LOGITS))


def head_has_loss(config: ResolvedConfig) -> bool:
    """Whether the head computes the loss and all gradients in its forward, and no logits are kept for backward."""
    return loss_chunks(config) > 1 or canonical_blocks(config) > 1
