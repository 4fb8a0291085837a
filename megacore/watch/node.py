"""The ledgers of a node: which ranks have one, and the stacks of these ranks."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

from megacore.watch.blame import Seen
from megacore.watch.ledger import SUFFIX
from megacore.watch.processes import is_busy, send, started, state_of
from megacore.watch.record import LedgerFile

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""On which a rank's faulthandler writes the Python stacks of its threads; it needs no lock of the interpreter."""
PURPOSE = "watch"  # of the directory (job_directory)
_SECONDS_TO_ANSWER = 0.8


def remove(directory: Path) -> None:
    """Remove a directory of ledgers: for others at once, and then its files."""
    gone = directory.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        directory.rename(gone)
        shutil.rmtree(gone)


class Node:
    """The ledgers of one directory, which an earlier run may have used and left. A ledger whose process is gone belongs
    to that run, unless the process made a mark after one that lives had started. Where none lives, it is known only if
    it was seen before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[int, LedgerFile] = {}
        self._descriptors: dict[int, int] = {}

    def look(self) -> list[Seen]:
        found: dict[int, LedgerFile] = {}
        for path in self.directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):  # being written
                rank = int(path.stem.removeprefix("rank-"))
                if rank not in self.files or self.files[rank].inode != path.stat().st_ino:
                    found[rank] = LedgerFile(path)
        files = self.files | found
        states = {rank: state_of(file.identity.pid, file.identity.born) for rank, file in files.items()}
        living = {rank for rank, state in states.items() if state != "gone"}
        for rank in living & found.keys():
            self._open(rank, found[rank].identity.pid)
        births = [started(files[rank].identity.born) for rank in living if files[rank].identity.born]
        if births:
            known = {rank for rank, file in files.items() if file.last_mark() > min(births)}
        else:
            known = self.files.keys() - found.keys()
        self.files = {rank: file for rank, file in files.items() if rank in living or rank in known}
        return [
            Seen(record=file.record(), state=states[rank], is_busy=is_busy(file.identity.pid))
            for rank, file in sorted(self.files.items())
        ]

    def wait(self, seconds: float) -> None:
        """Return after a time, or as soon as a rank ends."""
        events = select.poll()
        for descriptor in self._descriptors.values():
            events.register(descriptor, select.POLLIN)
        ended = [descriptor for descriptor, _ in events.poll(seconds * 1000)]
        for rank, descriptor in list(self._descriptors.items()):
            if descriptor in ended:
                os.close(self._descriptors.pop(rank))

    def _open(self, rank: int, pid: int) -> None:
        if rank in self._descriptors:
            os.close(self._descriptors.pop(rank))
        with contextlib.suppress(AttributeError, OSError):  # macOS has none: the next look sees it
            self._descriptors[rank] = os.pidfd_open(pid)

    def stacks(self, seen: list[Seen]) -> dict[int, str]:
        """The Python stacks of all threads of each rank; empty for those that do not answer in time."""
        before = {}
        for one in seen:
            file = stack_file(self.directory, one.rank)
            before[one.rank] = file.stat().st_size if file.exists() else -1
            if one.state == "running" and before[one.rank] >= 0:
                send(one.record.identity.pid, STACK_SIGNAL)
        deadline, texts = time.monotonic() + _SECONDS_TO_ANSWER, dict.fromkeys(before, "")
        settled: set[int] = {rank for rank, size in before.items() if size < 0}
        settled |= {one.rank for one in seen if one.state != "running"}
        while len(settled) < len(before) and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in before.keys() - settled:
                with contextlib.suppress(OSError):
                    text = stack_file(self.directory, rank).read_bytes()[before[rank] :].decode(errors="replace")
                    if text and text == texts[rank]:
                        settled.add(rank)
                    texts[rank] = text
        return texts


def report_file(directory: Path) -> Path:
    """Where the watcher leaves the report of a hang for the ranks."""
    return directory / "report.txt"


def leaving_file(directory: Path) -> Path:
    """Exists while the watcher makes sure that no rank needs it any more."""
    return directory / "leaving"


def stack_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return directory / f"rank-{rank}.stack"
