"""Where records go: metrics.jsonl always, a line to read, a progress bar on a terminal. Rank 0 alone has them."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megacore.errors import OutputClosed, StorageError, UserError


class Report:
    """What rank 0 tells the user.

    A fresh run never overwrites the metrics of an earlier one: they are set aside as metrics.jsonl.1, .2 and so on.
    A resumed run appends, and refuses a file with a line that is no record: to drop the line would lose what it said.

    Args:
        output_dir: directory of metrics.jsonl.
        train_iters: steps of the run, for the bar.
        first_step: steps already done.
        quiet: say and write nothing (every rank but the first).
    """

    def __init__(self, output_dir: Path, *, train_iters: int, first_step: int, quiet: bool) -> None:
        self._file: TextIO | None = None
        self._bar: Progress | None = None
        if quiet:
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / "metrics.jsonl"
        if first_step == 0:
            _set_aside(path)
        else:
            _keep_until(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        if sys.stderr.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("training", total=train_iters, completed=first_step)
            self._bar.start()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._file is not None:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                raise OutputClosed("what read the output has closed it") from None

    def record(self, values: dict[str, Any]) -> None:
        """Append one JSON object to metrics.jsonl; floats keep their full precision, and null stands for no number."""
        if self._file is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            try:
                self._file.write(json.dumps(finite, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                raise StorageError(f"{self._file.name}: {error.strerror}") from None

    def step_done(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _keep_until(path: Path, step: int) -> None:
    """Drop what an interrupted run reported after the step that this one resumes from: it will be reported again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [
        line
        for number, line in enumerate(lines, start=1)
        if line.endswith(b"\n") and _step_of(line, path, number) <= step
    ]
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        step = None
    if type(step) is not int:
        raise UserError(
            f"{path} line {number} is not a record of a run, so that this one cannot go on after it: "
            "mend or remove the line, move the file away, or use another --output-dir"
        )
    return step


def _set_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
