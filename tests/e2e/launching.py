"""Start the real training program, alone or under torchrun, and see what its processes say and whether they are gone.

Programs start warm (`tests/warm.py`), in processes forked from one that has torch and megacore loaded; `cold=True`
starts a new interpreter for each, as a user does, at 3 s of CPU time per process.

Under torchrun everything that a run prints goes to files in its folder `logs`: by them its processes are found, whoever
their parent is. Each rank has files of its own, so that what the ranks say is told from what torchrun says.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megacore.watch.processes import born
from tests.patience import patience, until
from tests.warm import Started, start

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
BERT_PROGRAM = ROOT / "pretrain_bert.py"
TORCHRUN = Path(__file__).with_name("warm_torchrun.py")
START, END = 90.0, 12.0  # seconds that four processes may take to begin on a busy machine, and to end

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds processes in /proc")


def free_port() -> int:
    """A port on which nobody listens, for who must know it before anybody does.

    It is none of those that the system gives to connections: another process would be given it meanwhile.
    """
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


def words(**values: object) -> list[str]:
    """Flags from keywords; True is a switch, and None leaves the flag out."""
    given = [(f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None]
    return [word for flag, value in given for word in ([flag] if value is True else [flag, str(value)])]


def small_run(output_dir: Path, **changes: object) -> list[str]:
    """The flags of a small run on generated data, with changes."""
    plain = {"mock_data": True, "vocab_size": 64, "preset": "gpt2-tiny", "train_iters": 4, "log_interval": 1}
    return words(**{**plain, "eval_interval": 0, "output_dir": output_dir, **changes})


@dataclass(frozen=True, kw_only=True)
class Job:
    """A started run under torchrun."""

    torchrun: subprocess.Popen[bytes] | Started
    logs: Path

    def pids(self) -> dict[int, int | None]:
        """Process id -> rank of the run's processes; None for torchrun itself and what else it started."""
        return dict(_writers(self.logs))

    def pid_of(self, rank: int) -> int:
        """The process of a rank: the oldest, before those that it has started, whose numbers may be lower."""
        return min((pid for pid, found in self.pids().items() if found == rank), key=born)

    def said(self, stream: str = "stderr") -> str:
        """What the ranks printed, one after the other."""
        return "".join(path.read_text() for path in sorted(self.logs.rglob(f"{stream}.log")))

    def wait_for_step(self, number: int) -> None:
        """Wait until the run has done so many steps; a run that ends before fails the test with what it said."""
        said = f"step {number}/"
        until(lambda: said in self.said("stdout") or self.torchrun.poll() is not None, START, f"no {said}")
        assert said in self.said("stdout"), self.said() + (self.logs / "torchrun.err").read_text()

    def ends(self, within: float) -> tuple[int, str]:
        """Wait for the end of all processes; torchrun's exit status and what it printed itself.

        Args:
            within: Seconds that it may take on a quiet machine.
        """
        status = self.torchrun.wait(patience(within))
        until(lambda: not self.pids(), within, "processes are left running")
        return status, (self.logs / "torchrun.err").read_text()


@contextlib.contextmanager
def under_torchrun(
    logs: Path, processes: int, script: Path, *flags: object, max_restarts: int = 0, cold: bool = False
) -> Iterator[Job]:
    """Start a script on several processes; nothing of it outlives the block.

    Args:
        logs: A new folder for what they print.
        processes: The number of ranks.
        script: What each of them runs.
        flags: Its flags.
        max_restarts: How often torchrun may start the ranks again.
        cold: Start torchrun and the ranks in new interpreters.
    """
    logs.mkdir()
    command = words(nproc_per_node=processes, max_restarts=max_restarts, redirects=3, log_dir=logs)
    command += [str(script), *map(str, flags)]
    output, errors = logs / "torchrun.out", logs / "torchrun.err"
    torchrun: subprocess.Popen[bytes] | Started
    if cold:
        with output.open("w") as out, errors.open("w") as err:
            command = [sys.executable, "-m", "torch.distributed.run", *command]
            torchrun = subprocess.Popen(command, env=environment(), stdout=out, stderr=err)
    else:
        torchrun = start(TORCHRUN, *command, stdout=output, stderr=errors, environment=environment())
    try:
        yield Job(torchrun=torchrun, logs=logs)
    finally:
        for pid, _ in _writers(logs):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        torchrun.wait()


@contextlib.contextmanager
def started(script: Path, output: Path, *flags: object, **variables: object) -> Iterator[Started]:
    """A program with these environment variables, whose errors go to a file; nothing of it outlives the block."""
    changed = environment() | {name: str(value) for name, value in variables.items()}
    program = start(script, *flags, stdout=output.with_suffix(".out"), stderr=output, environment=changed)
    try:
        yield program
    finally:
        program.kill_all()


def by_hand(rank: int, port: int, size: int = 2) -> dict[str, object]:
    """The environment of a rank that is started by hand, as Slurm does."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def patched_program(folder: Path, patch: str) -> Path:
    """pretrain_gpt.py after some lines that change what it imports."""
    lines = "import os, signal, sys\nimport pretrain_gpt\nfrom megacore.train.launch import exit_with\n"
    script = folder / "patched.py"
    script.write_text(f"{lines}{patch}\nexit_with(pretrain_gpt.main(sys.argv[1:]))\n")
    return script


def alone(
    *flags: object, timeout: float = 10.0, program: Path = PROGRAM, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run pretrain_gpt.py, or another program, in one process; `timeout` is in seconds of a quiet machine."""
    if cold:
        return run_cold(sys.executable, program, *flags, timeout=timeout)
    return run_warm(program, *flags, timeout=timeout)


def run_cold(
    *command: object, timeout: float = 60.0, directory: Path | None = None, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a new interpreter; `timeout` is in seconds of a quiet machine."""
    changed = environment() | {name: str(value) for name, value in variables.items()}
    words, limit = [str(word) for word in command], patience(timeout)
    return subprocess.run(words, cwd=directory, env=changed, capture_output=True, text=True, timeout=limit, check=False)


def run_warm(
    script: Path, *words: object, timeout: float, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end as subprocess.run would, but warm; `timeout` is in seconds of a quiet machine."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        run = start(script, *words, stdout=output, stderr=errors, environment=environment(), directory=directory)
        try:
            status = run.wait(patience(timeout))
        finally:
            run.kill_all()
        command = [str(script), *map(str, words)]
        return subprocess.CompletedProcess(command, status, output.read_text(), errors.read_text())


def records_of(output: Path) -> list[dict[str, Any]]:
    """What a run has logged."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(output: Path) -> dict[int, tuple[float, ...]]:
    """Step -> loss, gradient norm and samples so far."""
    names = ("train/loss", "train/grad_norm", "consumed_samples")
    return {r["step"]: tuple(r[name] for name in names) for r in records_of(output) if "train/loss" in r}


def losses_of_one_process(output: Path, **changes: object) -> dict[int, tuple[float, ...]]:
    """The losses of a small run with these flags on one process."""
    done = alone(*small_run(output, **changes), timeout=120.0)
    assert done.returncode == 0, done.stderr
    return losses(output)


def only_starts(output: str) -> bool:
    """Whether that is all a refused program has printed to stdout."""
    return all(line.startswith("starting ") for line in output.splitlines())


def environment() -> dict[str, str]:
    """The environment of a program: the caller's, one thread, and this repository."""
    return dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _writers(logs: Path) -> Iterator[tuple[int, int | None]]:
    """The processes whose output or errors go to a file in the folder, with the rank whose file it is."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended; a zombie has no files
            files = [os.readlink(process / "fd" / number) for number in "12"]
            if any(Path(file).is_relative_to(logs) for file in files):
                ranks = [int(rank) for file in files for rank in re.findall(r"/attempt_\d+/(\d+)/", file)]
                yield int(process.name), ranks[0] if ranks else None
