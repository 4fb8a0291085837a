"""How far something is that takes a while: a bar on a terminal, otherwise a line per minute; on the first rank only."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import ClassVar, Literal, Self

import rich.console
import rich.progress

Unit = Literal["bytes", "datasets", "steps", "tensors"]
LINE_EVERY_S = 60.0


class Bars:
    """The bars of this process. A terminal has one display, which every bar is a row of.

    Attributes:
        display: None while there is no bar.
    """

    display: ClassVar[rich.progress.Progress | None] = None
    _open: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def add(cls, what: str, total: int, done: int = 0) -> rich.progress.TaskID:
        """A new bar."""
        with cls._lock:
            if cls.display is None:
                cls.display = rich.progress.Progress(
                    rich.progress.TextColumn("{task.description}"),
                    rich.progress.BarColumn(),
                    rich.progress.TextColumn("{task.fields[figures]}"),
                    rich.progress.TimeRemainingColumn(),
                    console=rich.console.Console(stderr=True),
                    transient=True,
                )
                cls.display.start()
            cls._open += 1
            return cls.display.add_task(what, total=total, completed=done, figures="")

    @classmethod
    def remove(cls, bar: rich.progress.TaskID) -> None:
        """The bar is no longer needed."""
        with cls._lock:
            assert cls.display is not None
            cls.display.remove_task(bar)
            cls._open -= 1
            if cls._open == 0:
                cls.display.stop()
                cls.display = None


class Progress:
    """Shows on stderr how far something is, while its context lasts; any thread may advance it.

    Without a terminal it prints a line per minute, and so nothing for what takes less.

    Args:
        what: is done, such as "verifying".
        total: bytes, or other units, that there are.
        unit: what is counted.
        done: units that are done already.
    """

    def __init__(self, what: str, total: int, *, unit: Unit = "bytes", done: int = 0) -> None:
        self._what, self._total, self._done, self._unit = what, total, done, unit
        self._shows = os.environ.get("RANK", "0") == "0"
        self._lock = threading.Lock()
        self._bar: rich.progress.TaskID | None = None

    def __enter__(self) -> Self:
        self._next_line = time.monotonic() + LINE_EVERY_S
        if self._shows and sys.stderr.isatty():
            self._bar = Bars.add(self._what, self._total, self._done)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            Bars.remove(self._bar)
            self._bar = None

    def advance(self, count: int) -> None:
        """Count units as done."""
        with self._lock:
            self._done += count
            self._show("")

    def reach(self, done: int, figures: str = "") -> None:
        """So many units are done.

        Args:
            done: in all.
            figures: to be shown in place of this number.
        """
        with self._lock:
            self._done = done
            self._show(figures)

    def _show(self, figures: str) -> None:
        if self._bar is not None and Bars.display is not None:
            Bars.display.update(self._bar, completed=self._done, figures=figures or self._figures())
        elif self._shows and self._bar is None and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            share = f"{self._done / max(self._total, 1):.0%}"
            print(f"{self._what}: {share}, {figures or self._figures()}", file=sys.stderr, flush=True)

    def _figures(self) -> str:
        if self._unit == "bytes":
            return f"{self._done / 1e9:,.1f} of {self._total / 1e9:,.1f} GB"
        return f"{self._done:,} of {self._total:,} {self._unit}"
