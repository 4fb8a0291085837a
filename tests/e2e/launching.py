"""Start the real training program, alone or under torchrun, and see what its processes say and whether they are gone.

Every run carries a mark in its environment, which its processes inherit: they are found by it, whoever their parent is.
Under torchrun each rank's stderr goes to a file of its own, so that what the ranks say is told from what torchrun says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import patience, until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
BERT_PROGRAM = ROOT / "pretrain_bert.py"
MARK = "MEGACORE_TEST_RUN"

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


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

    torchrun: subprocess.Popen[str]
    mark: str
    logs: Path

    def pids(self) -> dict[int, int | None]:
        """Process id -> rank of the run's processes; None for torchrun itself and what else it started."""
        return dict(_marked(self.mark))

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""
        return next(pid for pid, found in self.pids().items() if found == rank)

    def said(self, stream: str = "stderr") -> str:
        """What the ranks printed, one after the other."""
        return "".join(path.read_text() for path in sorted(self.logs.rglob(f"{stream}.log")))

    def ends(self, within: float) -> tuple[int, str]:
        """Wait for the end of all processes; torchrun's exit status and what it printed itself.

        Args:
            within: Seconds that it may take on a quiet machine.
        """
        _, text = self.torchrun.communicate(timeout=patience(within))
        until(lambda: not self.pids(), within, "processes are left running")
        return self.torchrun.returncode, text


@contextlib.contextmanager
def under_torchrun(logs: Path, processes: int, *command: object, max_restarts: int = 0) -> Iterator[Job]:
    """Start `command` (a script and its flags) on several processes; nothing of it outlives the block."""
    mark = uuid.uuid4().hex
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    start += ["--max-restarts", str(max_restarts)]
    start += ["--redirects", "3", "--log-dir", str(logs), *map(str, command)]
    pipe = subprocess.PIPE
    with subprocess.Popen(start, env=_environment(mark), stdout=pipe, stderr=pipe, text=True) as torchrun:
        try:
            yield Job(torchrun=torchrun, mark=mark, logs=logs)
        finally:
            for pid, _ in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def alone(*flags: object, timeout: float = 10.0, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run pretrain_gpt.py, or another program, in one process; `timeout` is in seconds of a quiet machine."""
    command = [sys.executable, str(program), *map(str, flags)]
    environment = _environment(uuid.uuid4().hex)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience(timeout), check=False
    )


def _environment(mark: str) -> dict[str, str]:
    return dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark}


def _marked(mark: str) -> Iterator[tuple[int, int | None]]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables:  # a zombie's is empty
                ranks = [int(text[5:]) for text in variables if text.startswith(b"RANK=")]
                yield int(path.parent.name), ranks[0] if ranks else None
