"""Settings that need the values of tensors, so that `--dry-run=full` refuses them. Nothing here loads torch, so that a
refusal does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

from megacore.config import ResolvedConfig


def unfit_settings(config: ResolvedConfig) -> Iterator[str]:
    """Why a configuration cannot take a step on fake tensors: one message for each setting."""
    if config.training.compile:
        yield (
            "--compile: compiled code does not run on fake tensors; leave --compile out, which changes no shape, or "
            "use --dry-run without full"
        )
    if getattr(config.optimizer_settings, "moments_dtype", "fp32") == "int8":
        yield (
            "--moments-dtype int8: which blocks of moments ranks share follows from numbers that fake tensors do not "
            "have; use --moments-dtype bf16, or --dry-run without full"
        )
