"""Where the events of a run go: metrics.jsonl, events.jsonl, the user; trackers/background.py has the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from megacore.checkpoint import WriterLock, lock_again
from megacore.errors import StorageError, UserError
from megacore.files import GrowingFile, open_regular, replace_bytes, replacing
from megacore.observe.records import finite, json_lines
from megacore.progress import Bars
from megacore.train.callbacks import Event
from megacore.train.observers import say

FIGURES = ("log", "evaluate")
"""The kinds of events that are records of metrics.jsonl."""
END_SECONDS, _END_SECONDS_AFTER_ERROR = 60.0, 5.0


class Sink:
    """Takes events of a rank."""

    def takes(self, kind: str) -> bool:
        """Whether it takes events of this kind: figures, for most sinks."""
        return kind in FIGURES

    def take(self, event: Event) -> None:
        """Something has happened."""

    def rewind(self, step: int) -> None:
        """The run is back at this step: what follows replaces the records of figures after it."""

    def close(self, *, failed: bool, until: float) -> None:
        """Nothing follows. `failed`: the run ended with an error. `until`: time.monotonic to wait for at most."""


def finish(sinks: Iterable[Sink], *, failed: bool = False) -> None:
    """Close sinks; all together get a minute, or seconds after an error."""
    until = time.monotonic() + (_END_SECONDS_AFTER_ERROR if failed else END_SECONDS)
    for sink in sinks:
        sink.close(failed=failed, until=until)


class Console(Sink):
    """Prints messages, above the bars of a terminal. `may_fail`: text that cannot be written is left out; otherwise
    this ends the run."""

    def __init__(self, *, may_fail: bool) -> None:
        self._may_fail = may_fail

    def takes(self, kind: str) -> bool:
        return kind == "message"

    def take(self, event: Event) -> None:
        text = event.values["text"]
        if Bars.display is not None:
            Bars.display.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            say(text, may_fail=self._may_fail)


class MetricsFile(Sink):
    """metrics.jsonl: a JSON object per logged step and evaluation. A fresh run sets those of an earlier one aside, as
    metrics.jsonl.1 and so on; a resumed one appends, and refuses a file with a line that is not a record: dropping it
    would lose data. `may_drop`: a record that cannot be written is left out; otherwise this ends the run."""

    def __init__(self, output_dir: Path, *, first_step: int, say: Callable[[str], None], may_drop: bool) -> None:
        self._lock: WriterLock | None = None  # of the directory that was made again
        self._say, self._may_drop, self._warned, self._dropped = say, may_drop, False, 0
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._settings = output_dir / "metrics.jsonl", output_dir / "config.toml"
        # Kept for a directory that is deleted during the run: records without their settings say little.
        self._settings_text = self._settings.read_bytes() if self._settings.is_file() else None
        if first_step == 0:
            set_aside(self._path)
        else:
            keep_until(self._path, first_step)
        self._file = self._open()

    def take(self, event: Event) -> None:
        """Append one JSON object; floats keep their full precision, and null stands for no number. Raises StorageError
        where it cannot be written, and is not to be dropped."""
        line = json.dumps(finite(event.values), allow_nan=False) + "\n"
        if not self._written(partial(self._file.append, line.encode())):
            self._dropped += 1

    def rewind(self, step: int) -> None:
        """Drop the records of steps that the run takes again."""
        self._written(self._file.restore)
        self._file.close()
        keep_until(self._path, step)
        self._file = self._open()

    def close(self, *, failed: bool, until: float) -> None:
        """Flush the file; one of a run that fails is left as it is."""
        if failed:
            return
        self._written(self._file.restore)
        self._written(self._file.sync)
        if self._dropped:
            self._say(f"warning: {self._path} lacks {self._dropped} records, which could not be written")
        self._file.close()

    def _open(self) -> GrowingFile:
        """The records; where another run has the directory by the time they must be made again, UserError ends this."""

        def lock() -> None:
            self._lock = lock_again(self._path.parent) or self._lock

        return GrowingFile(self._path, before_restoring=lock)

    def _tell_of_restored(self, what: str) -> None:
        directory = self._settings.parent
        if self._settings_text is not None and not self._settings.exists():
            replace_bytes(self._settings, self._settings_text, durable=False)
            what += f", and {self._settings.name}; checkpoints and other files of {directory} are not there any more"
        self._say(f"warning: {what}")

    def _written(self, write: Callable[[], str | None]) -> bool:
        """Whether a write to the file succeeded; warns at the first failure if the run may continue."""
        try:
            if (restored := write()) is not None:
                self._tell_of_restored(restored)
        except OSError as error:
            problem = f"{self._path}: {error.strerror}"
            if not self._may_drop:
                raise StorageError(problem) from None
            if not self._warned:
                lost = "what cannot be written is left out, and training continues (--on-save-error warn)"
                self._say(f"warning: {problem}; {lost}")
            self._warned = True
            return False
        return True


class EventsFile(Sink):
    """events.jsonl: a JSON object per event besides figures, with `event`, `time` (UTC) and `step`. A fresh run sets
    the file of an earlier one aside. One that cannot be written ends nothing. `first_step`: steps done before this
    start."""

    def __init__(self, output_dir: Path, *, first_step: int, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = output_dir / "events.jsonl", warn, False
        self._file: GrowingFile | None = None
        if first_step == 0:
            set_aside(self._path)

    def takes(self, kind: str) -> bool:
        """All that happens, but for figures and messages."""
        return kind != "message" and kind not in FIGURES

    def take(self, event: Event) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about: dict[str, Any] = {"event": event.kind, "time": now, "step": event.step}
        # `about` twice: its keys come first in the line, and no value of an event replaces them.
        line = json.dumps(finite({**about, **event.values, **about}), allow_nan=False, default=str)
        try:
            self._file = self._file or GrowingFile(self._path)
            self._file.append(f"{line}\n".encode())
        except OSError as error:
            if not self._warned:
                self._warn(f"{self._path}: {error.strerror}; training continues without this record of events")
            self._warned = True


def keep_until(path: Path, step: int) -> None:
    """Drop what an interrupted run reported after the step that this one resumes from: it will be reported again."""
    if not path.exists():
        return
    remedy = "move the file away, or use another --output-dir"
    try:
        file = open_regular(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}), so this run cannot append to it: {remedy}"
        ) from None
    try:
        # Into a new file: a run that is killed here loses none of the old records.
        with file, replacing(path, durable=False) as kept:
            for number, (line, record) in enumerate(json_lines(file), start=1):
                # The last line of a run that was killed while it wrote.
                if not line.endswith(b"\n"):
                    continue
                if type(of := record and record.get("step")) is not int:
                    raise UserError(
                        f"{path} line {number} is not a record of a run, so this run cannot append to it: mend or "
                        f"remove the line, {remedy}"
                    )
                if of <= step:
                    kept.write(line)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run to the first free one of NAME.1, NAME.2 and so on."""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
