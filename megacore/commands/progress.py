"""How far a command is: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

import rich.console
import rich.progress

from megacore.data.indexed.preprocess import Report

_LINE_EVERY_S = 10.0
_BYTES_LINE_EVERY_S = 60.0


def figures(report: Report) -> str:
    """Documents, megabytes of text and tokens per second."""
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.documents / seconds:,.0f} documents/s, {report.text_bytes / seconds / 1e6:.2f} MB/s, "
        f"{report.tokens / seconds:,.0f} tokens/s"
    )


class Progress:
    """Shows reports on stderr while its context lasts.

    Args:
        total_bytes: Bytes of the input files on disk.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.TaskProgressColumn(),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.TimeRemainingColumn(),
                console=rich.console.Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total_bytes)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, report: Report) -> None:
        """Show a report."""
        if self._bar is not None:
            self._bar.update(self._task, completed=report.file_bytes, description=self._text(report))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            share = report.file_bytes / max(self._total, 1)
            print(f"{share:.0%}: {self._text(report)}", file=sys.stderr, flush=True)

    def _text(self, report: Report) -> str:
        return f"{report.documents:,} documents, {figures(report)}"


class ByteProgress:
    """Shows on stderr how many bytes a command has read, while its context lasts; any thread may advance it.

    Without a terminal it prints a line per minute, and so nothing for what takes less.

    Args:
        what: is done, such as "verifying".
        total: bytes that there are.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._lock = threading.Lock()
        self._next_line = time.monotonic() + _BYTES_LINE_EVERY_S
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.DownloadColumn(),
                rich.progress.TimeRemainingColumn(),
                console=rich.console.Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count bytes as read."""
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + _BYTES_LINE_EVERY_S
                figures = f"{self._done / 1e9:,.1f} of {self._total / 1e9:,.1f} GB"
                print(f"{self._what}: {self._done / max(self._total, 1):.0%}, {figures}", file=sys.stderr, flush=True)
