"""Runs the parts of the check one after the other, each in a process of its own and within its share of the time.

A part that fails, hangs or takes the driver down with it costs the others nothing; what it had recorded until then is
kept. Standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.gpu_check.records import Record, read_records

ROOT = Path(__file__).resolve().parents[2]
Status = Literal["done", "failed", "cut off", "not started"]
# With less than this left a part is not started: it would not get past its imports.
LEAST_SECONDS = 5.0
_LOG_TAIL = 20_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the check.

    Attributes:
        name: in the report, and of its files.
        arguments: of the interpreter; `--records FILE` is added.
        weight: its share of the time that is left, relative to the weights of the parts after it.
        required: without it nothing else is started.
    """

    name: str
    arguments: Sequence[str]
    weight: float
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part ended.

    Attributes:
        name: the part's.
        status: done; failed (exit status not 0); cut off at its limit; not started, because no time was left or a
            required part failed.
        exit_status: of its process; None if it was cut off or never started.
        seconds: that it ran.
        limit_seconds: that it might have run.
        records: what it measured, complete or not.
        log_tail: the end of what it printed, unless it is done.
    """

    name: str
    status: Status
    exit_status: int | None
    seconds: float
    limit_seconds: float
    records: list[Record] = field(default_factory=list)
    log_tail: str = ""


def run_parts(
    parts: Sequence[Part],
    directory: Path,
    *,
    seconds: float,
    environment: Mapping[str, str],
    report: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run all parts that the time allows.

    A part may take `weight / (its weight and those of all later parts)` of the time that is left, so that what one
    leaves unused goes to those after it.

    Args:
        parts: in order.
        directory: for their records and logs.
        seconds: for all of them.
        environment: of their processes.
        report: called with each outcome as soon as it is known.
    """
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    useless = False
    for index, part in enumerate(parts):
        left = 0.0 if useless else max(0.0, end - time.monotonic())
        limit = left * part.weight / sum(later.weight for later in parts[index:])
        outcomes.append(_run(part, directory, limit, environment))
        report(outcomes[-1])
        useless |= part.required and outcomes[-1].status != "done"
    return outcomes


def _run(part: Part, directory: Path, limit: float, environment: Mapping[str, str]) -> Outcome:
    if limit < LEAST_SECONDS:
        return Outcome(name=part.name, status="not started", exit_status=None, seconds=0.0, limit_seconds=limit)
    records, log = directory / f"{part.name}.jsonl", directory / f"{part.name}.log"
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments, "--records", str(records)],
            cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            exit_status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            exit_status = None
        finally:
            _end(process)
    status: Status = "cut off" if exit_status is None else "failed" if exit_status else "done"
    return Outcome(
        name=part.name,
        status=status,
        exit_status=exit_status,
        seconds=time.monotonic() - start,
        limit_seconds=limit,
        records=read_records(records),
        log_tail="" if status == "done" else log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:],
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a part: its process, and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
