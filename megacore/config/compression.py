"""Formats in which gradients and momenta travel in few bits. The arithmetic is in megacore/zero/compressed.py; sizes
are here, because memory and traffic are planned before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from megacore.config.dimensions import ranks_of_role
from megacore.config.schema import Config, ResolvedConfig


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a block of numbers is sent."""

    block: int  # elements of a block. No block has elements of two parameters.
    block_bytes: int  # that are sent of it, with its scale

    @property
    def bytes_per_element(self) -> float:
        return self.block_bytes / self.block


FORMATS: Final = {
    "sign": Format(block=2048, block_bytes=2048 // 8 + 4),
    "int8": Format(block=256, block_bytes=256 + 4),
    "bf16": Format(block=256, block_bytes=2 * 256),
}
"""sign: a bit of each element. int8: 8 bits. Both have an fp32 scale for each block. bf16: no scale."""


def format_of(config: Config) -> Format | None:
    """The format of what the replicas sum in each step, with 1-bit optimizers after the warm-up; None: as it is."""
    name = config.optimizer_settings.momentum_format or config.precision.grad_reduce_compression
    return None if name == "none" else FORMATS[name]


def error_bytes(config: ResolvedConfig, parameters: float) -> float:
    """Bytes of the compression's errors that a rank keeps: fp32, of all that it sends, and of the part whose sum it
    sends on."""
    replicas = ranks_of_role("replicas", config.parallel)
    if format_of(config) is None or replicas == 1:
        return 0.0
    passed_on = 1 / replicas if config.parallel.zero_stage == 0 else 0.0
    mask = 1 + passed_on if config.optimizer_settings.momentum_format else 0.0  # a bool of each
    return parameters * (4 * (1 + passed_on) + mask)
