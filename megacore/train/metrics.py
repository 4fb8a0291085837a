"""What a step reports: one record with full-precision numbers, and one line to read."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

# How a record's keys read in the log line, in order, after the loss and its terms.
_LINE = (
    ("train/lr", "lr", "{:.3e}"),
    ("train/grad_norm", "grad norm", "{:.3f}"),
    ("perf/tokens_per_sec", "tokens/s", "{:,.0f}"),
    ("perf/tflops_per_rank", "TFLOP/s per rank", "{:.4f}"),
    ("perf/mfu", "MFU", "{:.1%}"),
    ("perf/step_time_s", "s/step", "{:.3f}"),
    ("mem/peak_gib", "GiB peak", "{:.2f}"),
    ("train/loss_scale", "loss scale", "{:g}"),
)


def log_line(record: Mapping[str, Any], train_iters: int, *, terms: Sequence[str] = ()) -> str:
    """One line a logged step: `step 20/300 | loss 5.4321 | lr 3.000e-04 | ...`.

    Args:
        record: by the keys of metrics.jsonl.
        train_iters: steps of the run.
        terms: names of the loss's terms, where it has several.
    """
    losses = [f"{_words(name)} {_figure(record[f'train/{name}'])}" for name in ("loss", *terms)]
    parts = [f"{label} {form.format(record[key])}" for key, label, form in _LINE if key in record]
    skipped = [f"{record['train/skipped_steps']} skipped"] if record.get("train/skipped_steps") else []
    return " | ".join([f"step {record['step']}/{train_iters}", *losses, *parts, *skipped])


def evaluation_line(step: int, figures: Mapping[str, float | None], train_iters: int) -> str:
    """One line an evaluation: `step 20/300 | eval loss 5.4321`, and what else was evaluated."""
    first, *others = [f"{_words(key.removeprefix('eval/'))} {_figure(value)}" for key, value in figures.items()]
    return " | ".join([f"step {step}/{train_iters}", f"eval {first}", *others])


def _figure(value: float | None) -> str:
    """`none` where nothing was counted."""
    return "none" if value is None else f"{value:.4f}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the accelerator, or resident in this process on a CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def synchronize(device: torch.device) -> None:
    """Wait for the accelerator, so that a clock read after this means something."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """The accelerator's name as its driver reports it; `cpu` on a CPU."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
