"""Starts the ranks of a side and talks to them over pipes, so that sides take turns; between turns a side waits."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import time
from dataclasses import dataclass
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
        process_peak: the same, with the framework.
    """

    seconds: float
    losses: list[float]
    peak: int
    process_peak: int


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
        self.job, self.patience = job, patience
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._answers: list[Any] = []
        path = job.directory / f"{job.side}.json"
        path.write_text(job.to_json(), encoding="utf-8")
        remove_stale_locks(EXTENSIONS)
        environment = _environment(job)
        with log.open("ab") as out:
            for rank in range(job.layout.ranks):
                read, write = os.pipe()
                self._ranks.append(
                    subprocess.Popen(
                        [python, "-m", "benchmarks.comparison.worker", str(path), str(write)],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=(write,),
                    )
                )  # fmt: skip
                os.close(write)
                self._answers.append(os.fdopen(read, encoding="utf-8"))
        try:
            self.name = str(self._collect()[0]["name"])
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> Turn:
        """Run steps on all ranks.

        Raises:
            SideFailed: a rank failed.
        """
        for process in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its answer says why
                process.stdin.write(f"{steps}\n".encode())
                process.stdin.flush()
        answers = self._collect()
        losses = [_mean(known) for known in zip(*(answer["losses"] for answer in answers), strict=True)]
        return Turn(
            seconds=max(answer["seconds"] for answer in answers),
            losses=losses,
            peak=max(answer["peak"] for answer in answers),
            process_peak=max(answer["process_peak"] for answer in answers),
        )

    def _collect(self) -> list[dict[str, Any]]:
        """One answer of every rank; the first error ends the wait, as the other ranks may wait for that one."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.patience
        while len(answers) < len(self._ranks):
            waiting = {self._answers[rank]: rank for rank in range(len(self._ranks)) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise SideFailed(f"rank {min(waiting.values())} did not answer in {self.patience:.0f} s")
            for pipe in ready:
                line = pipe.readline()
                answer = json.loads(line) if line else {"error": f"rank {waiting[pipe]} died"}
                if "error" in answer:
                    raise SideFailed(answer["error"])
                answers[waiting[pipe]] = answer
        return [answers[rank] for rank in range(len(self._ranks))]

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for pipe in self._answers:
            pipe.close()


def remove_stale_locks(extensions: Path) -> None:
    """Remove the locks of compilations that were ended: torch waits for a lock for as long as its file is there. The
    sides of a comparison start one after the other, so that none compiles now.

    Args:
        extensions: where torch puts what it compiles.
    """
    for lock in extensions.glob("*/lock"):
        lock.unlink(missing_ok=True)


def _mean(values: tuple[float, ...]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _environment(job: Job) -> dict[str, str]:
    """torchrun's variables, and one thread per rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = str(job.layout.ranks)
    return {
        **os.environ,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    }
