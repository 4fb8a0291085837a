"""Formats in which gradients and momenta travel in few bits, and what the flags that choose one must agree with.

The arithmetic is in megacore/zero/compressed.py; sizes are here, because memory and traffic are planned before torch is
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megacore.config.dimensions import ranks_of_role
from megacore.config.fields import LARGEST_INT
from megacore.config.rules import Rules
from megacore.config.schema import Config, ResolvedConfig

COMPRESSION_RULES = Rules()


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a block of numbers is sent.

    Attributes:
        block: elements of a block. No block has elements of two parameters.
        block_bytes: that are sent of it, with its scale.
    """

    block: int
    block_bytes: int

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
    sends on.

    Args:
        config: a resolved configuration.
        parameters: that the rank holds.
    """
    replicas = ranks_of_role("replicas", config.parallel)
    if format_of(config) is None or replicas == 1:
        return 0.0
    passed_on = 1 / replicas if config.parallel.zero_stage == 0 else 0.0
    mask = 1 + passed_on if config.optimizer_settings.momentum_format else 0.0  # a bool of each
    return parameters * (4 * (1 + passed_on) + mask)


@COMPRESSION_RULES.about(
    "optimizer", "zero_stage", "offload_optimizer", "grad_reduce_compression", "reproducible", "onebit_freeze_step",
    "train_iters", "gradient_noise_interval",
)  # fmt: skip
def _one_bit(config: Config, world_size: int) -> Iterator[str]:
    """What 1-bit optimizers do not work with."""
    if config.optimizer_settings.momentum_format is None:
        return
    given, parallel, chosen = f"--optimizer {config.optimizer.optimizer}", config.parallel, config.precision
    other = config.optimizer_settings.uncompressed
    if parallel.zero_stage:
        yield (
            f"{given} is not possible with --zero-stage {parallel.zero_stage}, because every replica needs the whole "
            f"momentum: use --zero-stage 0, or --optimizer {other} with --grad-reduce-compression int8"
        )
    if parallel.offload_optimizer:
        yield (
            f"{given} is not possible with --offload-optimizer, because the momentum is sent from the device: leave "
            f"--offload-optimizer out, or use --optimizer {other}"
        )
    if chosen.grad_reduce_compression != "none":
        yield (
            f"{given} is not possible with --grad-reduce-compression {chosen.grad_reduce_compression}, because it "
            f"sends no gradients after its warm-up: leave one of them out, or use --optimizer {other}"
        )
    if config.training.reproducible:
        yield (
            f"{given} is not possible with --reproducible, because its compression depends on the number of replicas: "
            f"leave --reproducible out, or use --optimizer {other}"
        )
    if config.logging.gradient_noise_interval:
        yield (
            f"{given} is not possible with --gradient-noise-interval {config.logging.gradient_noise_interval}, because "
            "after its warm-up nothing has the gradient of the global batch: leave --gradient-noise-interval out, or "
            f"use --optimizer {other}"
        )
    freeze = config.onebitadam.onebit_freeze_step
    if freeze is None and config.training.train_iters == LARGEST_INT:  # an engine
        yield (
            f"{given} needs --optimizer freeze-step where the length of the run is not known: use --optimizer "
            "freeze-step=1000"
        )
    if freeze is not None and freeze >= config.training.train_iters:
        most = config.training.train_iters - 1
        way = f"use {most} or less, or a larger --train-iters" if most else "use a larger --train-iters"
        yield (
            f"--optimizer freeze-step={freeze} must be below --train-iters {config.training.train_iters}, because "
            f"nothing would be compressed: {way}"
        )


@COMPRESSION_RULES.about("grad_reduce_compression", "reproducible", "zero_shard_size")
def _gradients(config: Config, world_size: int) -> Iterator[str]:
    """What compressed gradients do not work with."""
    if config.precision.grad_reduce_compression == "none":
        return
    given = f"--grad-reduce-compression {config.precision.grad_reduce_compression}"
    if config.training.reproducible:
        yield f"--reproducible needs exact sums of gradients, but {given} rounds them: leave one of them out"
    if config.parallel.zero_shard_size is not None:
        yield (
            f"{given} is not possible with --zero-shard-size {config.parallel.zero_shard_size}, whose sums over shards "
            "are not compressed: leave one of them out"
        )
