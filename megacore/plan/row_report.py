"""What --fit prints: the constants before and after with their units, and the errors of all rows, or both as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megacore.config.messages import counted
from megacore.plan.cluster import Cluster
from megacore.plan.least_squares import Vector
from megacore.plan.plan_json import described
from megacore.plan.planner import Origin
from megacore.plan.row_fit import CONSTANTS, RowFit


class _Value(NamedTuple):
    """A constant of a cluster: as a number in a unit, and as a report has it."""

    number: float
    unit: str
    text: str


def _constants(cluster: Cluster) -> Iterator[_Value]:
    """Those of `CONSTANTS`, in their order."""
    device, software = cluster.device, cluster.software
    shares = {
        "of the peak": device.product_efficiency.expected,
        "of the memory bandwidth": device.memory_efficiency.expected,
        "of the bandwidth": device.link_efficiency.expected,
        "of the bandwidth between nodes": device.network_efficiency.expected,
    }
    for whole, share in shares.items():
        yield _Value(share, f"share {whole}", f"{share:.1%} {whole.removesuffix(' between nodes')}")
    times = (device.node_link.latency, "us"), (software.block_seconds.expected, "ms"), (software.step_seconds, "ms")
    for seconds, unit in times:
        number = seconds * (1e6 if unit == "us" else 1e3)
        yield _Value(number, unit, f"{number:.3g} {unit}")


def fit_text(fit: RowFit, path: Path) -> str:
    """The fit in words and tables."""
    return "\n".join(_lines(fit, path))


def _lines(fit: RowFit, path: Path) -> Iterator[str]:
    yield f"Fit of {counted(len(fit.rows), 'row')} in {path}: {fit.base.name} with {fit.base.software.name}\n"
    yield "| constant | shipped | fitted |\n|---|---|---|"
    for constant, before, after in zip(CONSTANTS, _constants(fit.base), _constants(fit.cluster), strict=True):
        yield f"| {constant.name} | {before.text} | {after.text} |"
    if fit.cluster.layouts is not None:
        number = counted(len(fit.cluster.layouts.rows), "layout")
        yield f"\nWhat these leave of {number} is added to layouts like them (degrees, microbatch, shape)."
    yield "\n| errors | median | worst |\n|---|---|---|"
    for name, errors in (("shipped", fit.before), ("fitted", fit.after), ("left out", fit.left_out)):
        yield f"| {name} | {_size(errors, np.median)} | {_size(errors, np.max)} |"
    yield "\nAn error is predicted / measured - 1. Left out: each row is predicted from the others."
    if any(fit.is_aside):
        yield f"Set aside, as the others do not explain them: {counted(sum(fit.is_aside), 'row')}."
    if not fit.is_kept:
        yield "The shipped constants are kept: no fit predicts rows that are left out clearly better. Give more rows."
    yield "\n| line | measured | shipped | fitted | left out |\n|---|---|---|---|---|"
    columns = (fit.rows, fit.before, fit.after, fit.left_out, fit.is_aside)
    for row, before, after, left_out, is_aside in zip(*columns, strict=True):
        line = f"{row.line}, set aside" if is_aside else row.line
        yield f"| {line} | {row.seconds:.4g} s | {before:+.1%} | {after:+.1%} | {left_out:+.1%} |"


def _size(errors: Vector, of: Callable[[Vector], float]) -> str:
    return f"{of(abs(errors)):.1%}"


def fit_json(fit: RowFit, path: Path) -> dict[str, Any]:
    """The figures of `fit_text`: constants, and the errors of each row and their medians."""
    before: Origin = "fitted" if fit.base.is_fitted else "assumed"
    constants = {
        constant.name: {
            "shipped": {"value": shipped.number, "unit": shipped.unit, "origin": before, "low": None, "high": None},
            "fitted": {"value": fitted.number, "unit": fitted.unit, "origin": "fitted", "low": None, "high": None},
        }
        for constant, shipped, fitted in zip(CONSTANTS, _constants(fit.base), _constants(fit.cluster), strict=True)
    }
    errors = {"shipped_error": fit.before, "fitted_error": fit.after, "left_out_error": fit.left_out}
    rows = [
        {
            "line": row.line,
            "measured_seconds": row.seconds,
            **{name: float(error[number]) for name, error in errors.items()},
            "set_aside": bool(fit.is_aside[number]),
        }
        for number, row in enumerate(fit.rows)
    ]
    report = {
        "path": str(path),
        "base": fit.base.name,
        "software": fit.base.software.name,
        "kept": fit.is_kept,
        "constants": constants,
        "median_errors": {name: float(np.median(abs(error))) for name, error in errors.items()},
        "rows": rows,
    }
    own: dict[str, tuple[str, Origin]] = {
        "line": ("line of the file", "exact"),
        "measured_seconds": ("s", "exact"),
        **dict.fromkeys(errors, ("share of the measured time", "fitted")),
        "shipped_error": ("share of the measured time", before),
    }
    return described(report, "fitted", own)
