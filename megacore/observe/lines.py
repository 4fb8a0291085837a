"""Records as lines to read."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

# How a record's keys read in the log line, the most important first; a line has as many of them as fit.
_LINE = (
    ("train/lr", "lr", "{:.3e}"),
    ("train/grad_norm", "grad norm", "{:.3f}"),
    ("perf/tokens_per_sec", "tokens/s", "{:,.0f}"),
    ("perf/mfu", "MFU", "{:.1%}"),
    ("perf/step_time_s", "s/step", "{:.3f}"),
    ("train/loss_scale", "loss scale", "{:g}"),
    ("perf/tflops_per_rank", "TFLOP/s per rank", "{:.4f}"),
    ("mem/peak_gib", "GiB peak", "{:.2f}"),
)
LINE_WIDTH = 120
"""Characters of a line of the log, at most."""
_SEPARATOR = " | "


def summary_line(label: str, text: str) -> str:
    """A line of the summary. A text wider than a line of the log is wrapped, with its further lines indented."""
    return textwrap.fill(
        text,
        LINE_WIDTH,
        initial_indent=f"  {label:<10}",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def log_line(
    record: Mapping[str, Any], train_iters: int, *, terms: Sequence[str] = (), last: Sequence[str] = ()
) -> str:
    """`step 20/300 | loss 5.4321 | lr 3.000e-04 | ...`, without figures for which `LINE_WIDTH` has no room. `terms`:
    names of the loss's terms, where it has several. `last`: what the line ends with."""
    losses = [f"{_words(name)} {_figure(record[f'train/{name}'])}" for name in dict.fromkeys(("loss", *terms))]
    skipped = [f"{record['train/skipped_steps']} skipped"] if record.get("train/skipped_steps") else []
    parts, ending = [f"step {record['step']}/{train_iters}", *losses], [*skipped, *last]
    for key, label, form in _LINE:
        if key in record:
            figure = f"{label} {form.format(record[key])}"
            if len(_SEPARATOR.join([*parts, figure, *ending])) <= LINE_WIDTH:
                parts.append(figure)
    return _SEPARATOR.join([*parts, *ending])


def evaluation_line(record: Mapping[str, Any], train_iters: int) -> str:
    """One line per evaluation: `step 20/300 | eval loss 5.4321`, and what else was evaluated. `record`: by the keys of
    metrics.jsonl."""
    figures = {key.removeprefix("eval/"): value for key, value in record.items() if key.startswith("eval/")}
    first, *others = [f"{_words(key)} {_figure(value)}" for key, value in figures.items()]
    return " | ".join([f"step {record['step']}/{train_iters}", f"eval {first}", *others])


def state_memory_line(record: Mapping[str, Any]) -> str:
    """How much memory the state takes on the fullest rank, as counted; from a logged step's record."""
    sizes = {
        key.removeprefix("mem/").removesuffix("_bytes"): value
        for key, value in record.items()
        if key.startswith("mem/") and key.endswith("_bytes")
    }
    return f"  {'memory':<10}MiB of state on the fullest rank, counted: {mebibytes(sizes)}"


def mebibytes(sizes: Mapping[str, float]) -> str:
    """Bytes by kind, as MiB in words."""
    return ", ".join(f"{kind} {size / 2**20:,.1f}" for kind, size in sizes.items())


def _figure(value: float | None) -> str:
    """`none` where nothing was counted."""
    return "none" if value is None else f"{value:.4f}"


def _words(name: str) -> str:
    return name.replace("_", " ")
