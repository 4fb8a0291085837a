"""Settings that need the values of tensors, so that `--dry-run=full` refuses them. Nothing here loads torch, so that a
refusal does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megacore.config import ResolvedConfig


def unfit_settings(config: ResolvedConfig) -> Iterator[str]:
    """Why a configuration cannot take a step on fake tensors: one message for each setting."""
    moments = getattr(config.optimizer_settings, "moments_dtype", "fp32")
    return unfit_values({"compile": config.training.compile, "moments_dtype": moments})


def unfit_values(values: Mapping[str, Any]) -> Iterator[str]:
    """The same of values by field, which may be those of no valid configuration."""
    if values.get("compile"):
        yield (
            "--compile: compiled code does not run on fake tensors; leave --compile out, which changes no shape, or "
            "use --dry-run without full"
        )
    if values.get("moments_dtype") == "int8":
        yield (
            "--optimizer moments-dtype=int8: which blocks of moments ranks share follows from numbers that fake "
            "tensors do not have; use --optimizer moments-dtype=bf16, or --dry-run without full"
        )
