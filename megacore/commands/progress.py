"""How far a preprocessing run is: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Self

import rich.console
import rich.progress

from megacore.data.indexed.preprocess import Report

_LINE_EVERY_S = 10.0


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
