"""Starts the ranks of a side and talks to them over pipes, so that sides take turns; between turns a side waits."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from benchmarks.comparison.job import Job

ROOT = Path(__file__).resolve().parent.parent.parent
EXTENSIONS = ROOT / ".venv-peers" / "torch_extensions"


class SideFailed(Exception):
    """A side could not be built, died or did not answer; the message says which, and what it printed is in its logs."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a number of steps took.

    Attributes:
        seconds: of the slowest rank.
        losses: of each step, the mean over the ranks that know it; NaN where none does.
        peak: bytes that the fullest rank has had in memory so far, without what it had before the model.
    """

    seconds: float
    losses: list[float]
    peak: int


class Side:
    """The ranks of one framework on one layout, until `close`.

    Args:
        job: for every rank.
        python: interpreter of the framework's environment.
        log: what the ranks print is appended there.
        patience: seconds to wait for an answer.

    Raises:
        SideFailed: a rank could not build the model.
    """

    def __init__(self, job: Job, python: Path, log: Path, *, patience: float = 300.0) -> None:
        self.patience = patience
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        for lock in EXTENSIONS.glob("*/lock"):  # of a compilation that was ended: torch would wait for it for ever
            lock.unlink(missing_ok=True)
        environment = _environment(job)
        with log.open("ab") as out:
            for rank in range(job.layout.ranks):
                pipe, theirs = Pipe()
                process = subprocess.Popen(
                    [python, "-m", "benchmarks.comparison.worker", str(theirs.fileno())],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT,
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(theirs.fileno(),),
                )  # fmt: skip
                self._ranks.append((process, pipe))
                theirs.close()
        try:
            self.name = str(self._ask(job)[0]["name"])
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> Turn:
        """Run steps on all ranks.

        Raises:
            SideFailed: a rank failed.
        """
        answers = self._ask(steps)
        losses = [_mean(known) for known in zip(*(answer["losses"] for answer in answers), strict=True)]
        seconds, peak = (max(answer[name] for answer in answers) for name in ("seconds", "peak"))
        return Turn(seconds=seconds, losses=losses, peak=peak)

    def _ask(self, what: object) -> list[dict[str, Any]]:
        """Every rank's answer; the first error ends the wait, as the other ranks may wait for that one."""
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):  # it has died, which its answer says
                pipe.send(what)
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.patience
        while len(answers) < len(self._ranks):
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise SideFailed(f"rank {min(waiting.values())} did not answer in {self.patience:.0f} s")
            for pipe, rank in ((pipe, waiting[pipe]) for pipe in ready if isinstance(pipe, Connection)):
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = {"error": f"rank {rank} died"}
                if "error" in answers[rank]:
                    raise SideFailed(answers[rank]["error"])
        return [answers[rank] for rank in range(len(self._ranks))]

    def close(self) -> None:
        """End the ranks."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.wait()
            pipe.close()


def _mean(values: tuple[float, ...]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _environment(job: Job) -> dict[str, str]:
    """torchrun's variables, and one thread per rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, world = str(free.getsockname()[1]), str(job.layout.ranks)
    return os.environ | {
        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    }  # fmt: skip
