"""How long a run may stand still before that counts as a hang; in multiples of `--hang-timeout-minutes`. A step may
take ten times the median of the last ones; a save, an evaluation and the first step have more. The limit stays below
the backend's timeout of a collective, which would end the run without naming a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacore.parallel.heartbeat import Phase
from megacore.watch.blame import Seen, Verdict
from megacore.watch.record import Record
from megacore.watch.report import name_of

TIMES: Mapping[Phase, float] = {
    Phase.STEP: 1.0,
    Phase.EVALUATE: 2.0,
    Phase.CHECK: 2.0,
    Phase.START: 6.0,
    Phase.LOAD: 6.0,
    Phase.SAVE: 6.0,
    Phase.SINK: 6.0,
    Phase.EXIT: 6.0,
    Phase.FIRST_STEP: 12.0,
    Phase.INDEX: 24.0,
    Phase.DONE: 6.0,
}
"""How many times the timeout one phase inside a section may take."""
STEPS = 10.0
"""How many median steps a run may stand still."""
GRACE_SECONDS = 12.0
"""How many seconds it may stand still after a signal to end: launchers kill 30 seconds after the signal."""
_GRACE_STEPS = 2.0
_UNHURRIED = frozenset({Phase.SAVE, Phase.EVALUATE, Phase.FIRST_STEP})
"""Sections that keep their time after a signal to end: a save must not be lost, and the other two have no step to be
compared with."""
_GRACE_AT_EXIT = 75.0
"""Everything is saved then, and trackers may take a minute to close (observe/sinks.py)."""
_OF_COLLECTIVE_TIMEOUT = 0.9


def still_seconds(seen: Sequence[Seen]) -> float:
    """How long no rank has moved. A run does not count in which every process is stopped (Ctrl-Z, scontrol suspend), or
    in which none is inside megacore."""
    watched = [one for one in seen if not one.is_done]
    if not watched or all(one.state == "stopped" for one in watched) or all(one.is_outside for one in watched):
        return 0.0
    return min(one.record.age for one in watched)


@dataclass(frozen=True)
class Limit:
    """How long a run may stand still, and what sets that."""

    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"{self.seconds:g} s: {self.reason}"


def limit(seen: Sequence[Seen], verdict: Verdict) -> Limit:
    """How long these ranks may stand still, if the verdict on them is right."""
    records = {one.rank: one.record for one in seen}
    identity = next(iter(records.values())).identity
    if verdict.kind in ("stopped", "gone"):  # needs no patience: it will not move again
        return _asked_to_end(Limit(identity.hang_timeout, "--hang-timeout-minutes"), records)
    blamed = [records[rank] for rank in verdict.ranks if rank in records] or list(records.values())
    allowed = max((_of_section(record) for record in blamed), key=_seconds)
    if not any(record.section in _UNHURRIED for record in blamed):
        at_exit = any(record.section is Phase.EXIT for record in blamed)
        allowed = _asked_to_end(allowed, records, _GRACE_AT_EXIT if at_exit else GRACE_SECONDS)
    if any(record.phase.communicates for record in records.values()):
        backend = _OF_COLLECTIVE_TIMEOUT * min(record.identity.collective_timeout for record in records.values())
        reason = f"{_OF_COLLECTIVE_TIMEOUT:g} x --distributed-timeout-minutes, which is less than {allowed.reason}"
        allowed = min(allowed, Limit(backend, reason), key=_seconds)
    return allowed


def _of_section(record: Record) -> Limit:
    times, median = TIMES[record.section], STEPS * record.median_step
    reason = f"{times:g} x --hang-timeout-minutes ({name_of(record.section)})"
    of_timeout = Limit(times * record.identity.hang_timeout, reason)
    return max(of_timeout, Limit(median, f"{STEPS:g} median steps"), key=_seconds)


def _asked_to_end(allowed: Limit, records: Mapping[int, Record], seconds: float = GRACE_SECONDS) -> Limit:
    """Less, where a signal asks the run to end and it does not come to it."""
    waiting = [record.terminating for record in records.values() if record.terminating is not None]
    if not waiting:
        return allowed
    median = max(record.median_step for record in records.values())
    grace = Limit(max(seconds, _GRACE_STEPS * median), "after a signal to end")
    return min(allowed, grace, key=_seconds)


def _seconds(allowed: Limit) -> float:
    return allowed.seconds
