"""Judge a layout's record against the one-process reference. The tolerance of a tensor is a multiple of what one unit
in the last place of the weights changes in the same tensor of the reference, because a layout differs by rounding in
the same way (after TTrace, arXiv 2506.09280). With --reproducible the layout promises the same bits, and the tolerance
is 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megacore.config import ResolvedConfig
from megacore.config.reproducible import canonical_blocks
from megacore.verify.reference import LARGEST, Check, Reference, relative_difference
from megacore.verify.run import EXACT_KINDS, KINDS, Key, Record

FACTOR = 8.0
"""A layout may differ by this many times what one unit in the last place changes."""
FLOOR = 1e-6
"""Smallest tolerance: relative rounding of an fp32 sum, and the promise for the loss of step 1."""
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compared tensor."""

    key: Key
    difference: float  # relative Frobenius norm of the difference
    largest: float  # largest absolute difference of an element
    measured: float  # the same relative norm, for one unit in the last place of the reference's weights
    tolerance: float  # of `difference`
    problem: str = ""  # what else is wrong: copies differ, or a side lacks the tensor

    @property
    def agrees(self) -> bool:
        return not self.problem and self.difference <= self.tolerance

    @property
    def badness(self) -> float:
        """How many times its tolerance the difference is; infinite for any other problem."""
        if self.problem:
            return float("inf")
        return self.difference / self.tolerance if self.tolerance else (float("inf") if self.difference else 0.0)

    def __str__(self) -> str:
        if self.problem:
            return f"{self.key}: {self.problem}"
        bounds = f"tolerance {self.tolerance:.1e}, one ulp {self.measured:.1e}"
        return f"{self.key}: {self.difference:.1e} of its norm, largest {self.largest:.1e} ({bounds})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a comparison."""

    rows: tuple[Row, ...]  # compared tensors, the worst first
    rounding_only: tuple[Key, ...]  # tensors that are zero but for rounding, and were not judged
    checks: tuple[Check, ...]  # of the reference
    # For each step the relative difference of the loss, and that between one-process runs.
    promise: tuple[tuple[float, float], ...]
    first: Row | None  # of the tensors that disagree the first one in the order of computation, forward
    # Of gradients that disagree in the same step the last one in forward order, which backward meets first.
    deepest: Row | None

    @property
    def agrees(self) -> bool:
        """Whether everything that was compared agrees, and something was."""
        return bool(self.rows) and all(row.agrees for row in self.rows) and all(c.agrees for c in self.checks)

    @property
    def disagreeing(self) -> list[Row]:
        return [row for row in self.rows if not row.agrees]


def compare(record: Record, reference: Reference, config: ResolvedConfig) -> Verdict:
    """Compare the record of a layout with the reference. `record`: of all ranks of the layout."""
    exact = config.training.reproducible and (config.parallel.tp == 1 or canonical_blocks(config) > 1)
    expected, found = reference.record.tensors, record.tensors
    rows, rounding_only = [], []
    for key in dict.fromkeys((*expected, *found)):
        perturbed = [run.tensors[key] for run in reference.perturbed if key in run.tensors and key in expected]
        measured = max((relative_difference(values, expected[key]) for values in perturbed), default=0.0)
        tolerance = _tolerance(key, measured, reference, exact=exact)
        problem = record.disagreements.get(key) or reference.record.disagreements.get(key) or ""
        difference = largest = np.inf
        if key not in found or key not in expected:
            problem = f"only {'one process' if key in expected else 'the layout'} has it"
        elif not problem and tolerance > LARGEST:
            rounding_only.append(key)
            continue
        elif not problem:
            difference = relative_difference(found[key], expected[key])
            if found[key].shape == expected[key].shape:
                largest = float(np.max(np.abs(found[key] - expected[key]), initial=0.0))
        rows.append(
            Row(
                key=key,
                difference=difference,
                largest=largest,
                measured=measured,
                tolerance=tolerance,
                problem=problem,
            )
        )
    # In the order in which a run computes them: a stable sort keeps that of the keys within a step and a kind.
    bad = [row for row in rows if not row.agrees]
    bad.sort(key=lambda row: (row.key.step, KINDS.index(row.key.kind)))
    gradients = [row for row in bad if row.key[:2] == bad[0].key[:2] and row.key.kind == "gradient"]
    losses = [key for key in expected if key.kind == "loss" and key in found]
    differences = (relative_difference(found[key], expected[key]) for key in losses)
    return Verdict(
        rows=tuple(sorted(rows, key=lambda row: -row.badness)),
        rounding_only=tuple(rounding_only),
        checks=reference.checks,
        promise=tuple(zip(differences, reference.loss_spread, strict=True)),
        first=bad[0] if bad else None,
        deepest=gradients[-1] if gradients else None,
    )


def _tolerance(key: Key, measured: float, reference: Reference, *, exact: bool) -> float:
    if exact or key.kind in EXACT_KINDS:
        return 0.0
    if key.kind == "loss" and key.step == 1:
        return FLOOR
    if key.kind == "loss":
        measured = max(measured, reference.loss_spread[key.step - 1])
    if key.kind == "weight change":
        return max(FLOOR, FACTOR * measured, _granularity(key, reference.record))
    return max(FLOOR, FACTOR * measured)


def _granularity(key: Key, record: Record) -> float:
    """What rounding of the stored weights makes of their change: the weight before and the one after may each come out
    one unit in the last place apart. Perturbed runs need not show it: few entries are near a rounding boundary."""
    weight = record.tensors[Key(0, "loaded weight", key.name)]
    for step in range(1, key.step + 1):
        weight = weight + record.tensors[Key(step, key.kind, key.name)]
    units = np.spacing(np.abs(weight).astype(np.float32)).astype(np.float64)
    change = float(np.linalg.norm(record.tensors[key]))
    return 2.0 * float(np.linalg.norm(units)) / change if change else 0.0


# ---- in words and as JSON


def describe(verdict: Verdict, reference: Reference) -> Iterator[str]:
    """The verdict in lines, the worst tensor first."""
    total, bad = len(verdict.rows), len(verdict.disagreeing)
    agree = f"{total - bad} of {total} tensors agree within their tolerance"
    yield f"{agree}, which follows from what one unit in the last place"
    yield "  (ulp) of the reference's weights changes in each; the worst:"
    for row in verdict.rows[:_SHOWN]:
        yield f"  {'agrees ' if row.agrees else 'DIFFERS'} {row}"
    if bad > _SHOWN:
        yield f"  and {bad - _SHOWN} more that differ (--json lists all)"
    if verdict.first is not None:
        yield f"first to differ, in forward order: {verdict.first}"
    if verdict.deepest is not None and verdict.deepest is not verdict.first:
        yield f"first to differ in backward: {verdict.deepest.key}"
    if only := verdict.rounding_only:
        yield f"not judged: {len(only)} tensors that are zero but for rounding, such as {only[0]}"
    one, other = reference.micro_batch_sizes
    yield (
        f"loss: relative difference of the layout, and of one-process runs with --micro-batch-size {one} and {other} "
        "without dropout:"
    )
    for step, (difference, spread) in enumerate(verdict.promise, start=1):
        yield f"  step {step}: {difference:.1e}, and {spread:.1e}{'; 1e-6 is promised' if step == 1 else ''}"
    for check in verdict.checks:
        state = "agree" if check.agrees else "DIFFER"
        nearest = f"{check.worst:.1e} where {check.tolerance:.1e} may be"
        yield f"{check.name}: {state}, the worst of {check.tensors} tensors by {nearest}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values; infinite numbers are null."""

    def finite(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    def row(one: Row) -> dict[str, Any]:
        step, kind, name = one.key
        numbers = {name: finite(getattr(one, name)) for name in ("difference", "largest", "measured", "tolerance")}
        return {"step": step, "kind": kind, "name": name, "agrees": one.agrees, "problem": one.problem, **numbers}

    return {
        "agrees": verdict.agrees,
        "compared": len(verdict.rows),
        "differing": len(verdict.disagreeing),
        "first": None if verdict.first is None else row(verdict.first),
        "rows": [row(one) for one in verdict.rows],
        "not_judged": [str(key) for key in verdict.rounding_only],
        "loss_difference": [finite(difference) for difference, _ in verdict.promise],
        "loss_spread_of_one_process": [finite(spread) for _, spread in verdict.promise],
        "checks": [
            {"name": c.name, "agrees": c.agrees, "worst": finite(c.worst), "tensors": c.tensors} for c in verdict.checks
        ],
    }
