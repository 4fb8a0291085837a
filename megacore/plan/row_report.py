"""What --fit prints: the constants before and after with their units, and the errors of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megacore.config.messages import counted
from megacore.plan.cluster import Cluster
from megacore.plan.least_squares import Vector
from megacore.plan.row_fit import CONSTANTS, RowFit


def _constants(cluster: Cluster) -> Iterator[str]:
    """Those of `CONSTANTS`, in their order."""
    device, software = cluster.device, cluster.software
    yield f"{device.product_efficiency.expected:.1%} of the peak"
    yield f"{device.memory_efficiency.expected:.1%} of the memory bandwidth"
    yield f"{device.link_efficiency.expected:.1%} of the bandwidth"
    yield f"{device.network_efficiency.expected:.1%} of the bandwidth"
    yield f"{device.node_link.latency * 1e6:.3g} us"
    yield f"{software.block_seconds.expected * 1e3:.3g} ms"
    yield f"{software.step_seconds * 1e3:.3g} ms"


def fit_text(fit: RowFit, path: Path) -> str:
    """The fit in words and tables."""
    return "\n".join(_lines(fit, path))


def _lines(fit: RowFit, path: Path) -> Iterator[str]:
    yield f"Fit of {counted(len(fit.rows), 'row')} in {path}: {fit.base.name} with {fit.base.software.name}\n"
    yield "| constant | shipped | fitted |\n|---|---|---|"
    for constant, before, after in zip(CONSTANTS, _constants(fit.base), _constants(fit.cluster), strict=True):
        yield f"| {constant.name} | {before} | {after} |"
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
