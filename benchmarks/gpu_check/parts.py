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
from collections.abc import Iterator, Mapping, Sequence
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
    limit_seconds: float
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)
    log_tail: str = ""


def run_parts(
    parts: Sequence[Part], directory: Path, *, seconds: float, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Run all parts that the time allows; yields each outcome as soon as it is known.

    A part may take `weight / (its weight and those of all later parts)` of the time that is left, so that what one
    leaves unused goes to those after it.

    Args:
        parts: in order.
        directory: for their records and logs.
        seconds: for all of them.
        environment: of their processes.
    """
    end, useless = time.monotonic() + seconds, False
    for index, part in enumerate(parts):
        left = 0.0 if useless else max(0.0, end - time.monotonic())
        outcome = _run(part, directory, left * part.weight / sum(later.weight for later in parts[index:]), environment)
        useless |= part.required and outcome.status != "done"
        yield outcome


def _run(part: Part, directory: Path, limit: float, environment: Mapping[str, str]) -> Outcome:
    if limit < LEAST_SECONDS:
        return Outcome(name=part.name, status="not started", exit_status=None, limit_seconds=round(limit, 1))
    records, log = directory / f"{part.name}.jsonl", directory / f"{part.name}.log"
    start, exit_status = time.monotonic(), None
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments, "--records", str(records)],
            cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            exit_status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
            process.wait()
    status: Status = "cut off" if exit_status is None else "failed" if exit_status else "done"
    said = "" if status == "done" else log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
    return Outcome(
        name=part.name, status=status, exit_status=exit_status, seconds=round(time.monotonic() - start, 1),
        limit_seconds=round(limit, 1),
        records=read_records(records), log_tail=said,
    )  # fmt: skip
