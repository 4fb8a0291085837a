"""The bubble of a built-in schedule in closed form, to compare with what the simulator finds.

For ranks that all take the same time, and transfers that take none; the sources are in pipeline/schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacore.pipeline.schedule import Schedule
from megacore.pipeline.simulator import Costs


@dataclass(frozen=True)
class ClosedForm:
    """A formula for the share of the ranks' time in which they do not compute, and its value."""

    formula: str
    value: float


def closed_form(schedule: Schedule, costs: Costs) -> ClosedForm | None:
    """The formula of a built-in schedule, or None where none holds.

    Those of `interleaved` and `zero-bubble` hold from as many microbatches on as there are ranks, and the latter only
    if a weight gradient takes no longer than a forward or an input gradient. That of `zb-v` and `dualpipev` holds from
    twice as many on, if all three take as long.

    Args:
        schedule: one of `build_schedule`.
        costs: durations; those of the first stage are used.
    """
    p, m, v = schedule.ranks, schedule.microbatches, schedule.virtual_stages
    f, b, w = costs.forward[0], costs.input_grad[0], costs.weight_grad[0]
    if schedule.name in ("1f1b", "gpipe"):
        return ClosedForm("(p − 1) / (m + p − 1)", (p - 1) / (m + p - 1))
    if schedule.name == "interleaved" and m >= p:
        return ClosedForm("(p − 1) / (v m + p − 1)", (p - 1) / (v * m + p - 1))
    if schedule.name == "zero-bubble" and m >= p and w <= min(f, b):
        waits, works = (p - 1) * (f + b - w), m * (f + b + w)
        return ClosedForm("(p − 1)(f + b − w) / (m (f + b + w) + (p − 1)(f + b − w))", waits / (works + waits))
    if schedule.is_v and m >= 2 * p and f == b == w:
        return ClosedForm("(p − 1) / (6 m + p − 1)", (p - 1) / (6 * m + p - 1))
    return None
