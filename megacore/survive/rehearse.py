"""Rehearse failures: start a command whose run survives, kill and stop its ranks at random, also while it recovers, and
say what each failure costs in this set-up (`tools/rehearse.py --failures N`)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megacore.config.messages import ranks_in_words
from megacore.errors import UserError
from megacore.survive.copies import keepers

T = TypeVar("T")
_MOST_SECONDS = 300.0  # that a run may take to begin, or to recover, on a busy machine
_PARTS = ("noticed", "agreed", "state", "step")


def rehearse_failures(command: Sequence[str], failures: int, *, seed: int = 0) -> int:
    """Run a command with so many failures; its exit status, or 1 where the run did not continue after one. Raises
    UserError where the command does not keep a run."""
    draw, costs = random.Random(seed), list[dict[str, float]]()
    with subprocess.Popen(command) as process:
        for number in range(1, failures + 1):
            if not _waited(process, _is_training):
                has_ended = process.poll() is not None
                how = "ended before a failure" if has_ended else f"took no training step in {_MOST_SECONDS:.0f} s"
                process.terminate()
                raise UserError(f"{command[0]} {how}: give it --survive, and more steps")
            time.sleep(draw.uniform(0.0, 2.0))
            struck, what = _strike(process.pid, draw)
            if draw.random() < 0.25:  # while it recovers
                time.sleep(draw.uniform(0.0, 2.0))
                struck, more = _strike(process.pid, draw)
                what += f", then {more}"
            if not (cost := _waited(process, partial(_recovery, struck))):
                is_done = process.poll() == 0
                print(f"failure {number}: {what}: the run {'is done' if is_done else 'did not continue'}", flush=True)
                process.terminate()
                return process.wait() or 1
            costs.append(cost)
            print(f"failure {number}: {what}: {_in_words(cost)}", flush=True)
        median = {part: statistics.median(cost[part] for cost in costs) for part in (*_PARTS, "total")}
        print(
            f"{failures} failures, of which the run continued after all; in the median {_in_words(median)}", flush=True
        )
        return process.wait()


def _strike(launcher: int, draw: random.Random) -> tuple[float, str]:
    """Kill or stop one to three ranks at once; when, and what in words."""
    ranks = _kept(launcher)
    victims = draw.sample(sorted(ranks), min(len(ranks), draw.randint(1, 3)))
    number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
    for rank in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank]["child"], number)
    return time.time(), f"{number.name} for {ranks_in_words(sorted(victims)) if victims else 'no rank'}"


def _kept(launcher: int) -> dict[int, dict[str, Any]]:
    """The keepers that a process has started, directly or not, and that have a child, by rank."""
    return {rank: said for rank, said in keepers() if said["child"] and launcher in _ancestors(said["keeper"])}


def _ancestors(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            yield pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _waited(process: subprocess.Popen[bytes], look: Callable[[int], T | None]) -> T | None:
    """What `look` finds of a command, by its process, once it does; None where that ends, or takes too long."""
    deadline = time.monotonic() + _MOST_SECONDS
    while (found := look(process.pid)) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _is_training(launcher: int) -> bool | None:
    return any(Path(said["output_dir"], "metrics.jsonl").stat().st_size for said in _with_metrics(launcher)) or None


def _with_metrics(launcher: int) -> list[dict[str, Any]]:
    return [said for said in _kept(launcher).values() if Path(said["output_dir"], "metrics.jsonl").is_file()]


def _recovery(struck: float, launcher: int) -> dict[str, float] | None:
    """What the first recovery that ended after a time has cost, in seconds; None: there is none."""
    for said in _with_metrics(launcher)[:1]:
        for line in Path(said["output_dir"], "events.jsonl").read_text().splitlines(keepends=True):
            event: dict[str, Any] = json.loads(line) if line.endswith("\n") else {"event": ""}  # written half
            if event["event"] == "recovery":
                parts = {part: event[f"seconds_{part}"] for part in ("agreed", "state", "step")}
                total, noticed = sum(parts.values()), event["noticed"]
                if noticed + total > struck:
                    return {**parts, "total": total, "noticed": max(0.0, noticed - struck)}
    return None


def _in_words(cost: dict[str, float]) -> str:
    parts = ", ".join(f"{part} {cost[part]:.1f} s" for part in _PARTS)
    return f"{parts}; {cost['total']:.1f} s from the notice to the next step"
