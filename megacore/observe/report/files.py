"""Reads what a run left in its output directory, however it ended: files may be missing, empty, or cut off."""

from __future__ import annotations

import math
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacore.checkpoint.lock import LOCK_NAME
from megacore.config.bert import BertConfig
from megacore.config.fields import field_infos
from megacore.config.messages import counted
from megacore.config.schema import sections_of
from megacore.config.spelling import flag
from megacore.errors import UserError
from megacore.files import take_lock
from megacore.observe.records import json_lines
from megacore.observe.report.series import LARGEST

Record = Mapping[str, Any]
_LARGEST_BYTES = {".jsonl": 1 << 30, ".toml": 1 << 24, ".json": 1 << 28}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that differs from its default."""

    flag: str
    value: str
    default: str


@dataclass(kw_only=True)
class RunFiles:
    """A run, as its files tell it."""

    directory: Path
    steps: list[Record] = field(default_factory=list)  # records of training steps, by step
    evaluations: list[Record] = field(default_factory=list)  # records of evaluations, by step
    events: list[Record] = field(default_factory=list)  # of events.jsonl, in order
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of config.toml, by section
    hangs: list[str] = field(default_factory=list)  # names of the watchdog's reports
    is_running: bool = False  # whether a process holds the directory
    problems: list[str] = field(default_factory=list)  # what could not be read

    def setting(self, section: str, name: str) -> Any:
        table = self.settings.get(section)
        return table.get(name) if isinstance(table, Mapping) else None

    def events_of(self, *kinds: str) -> list[Record]:
        return [event for event in self.events if event["event"] in kinds]

    def changed_settings(self) -> Iterator[Setting]:
        """The settings that differ from their defaults."""
        for name, section in sections_of(BertConfig).items():
            table = self.settings.get(name)
            if not isinstance(table, Mapping):
                continue
            for key, info in field_infos(section).items():
                default = () if info.default == () else info.default
                value = table.get(key, default)
                if (tuple(value) if isinstance(value, list) else value) != default:
                    shown = "none" if default in (None, ()) else "required" if info.required else _shown(default)
                    yield Setting(flag=flag(key), value=_shown(value), default=shown)


def read_run(directory: Path) -> RunFiles:
    """Read the files of an output directory. Raises UserError where it is no output directory of a run."""
    if not directory.is_dir():
        state = "is not a directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {state}: give the --output-dir of a run")
    names = ("metrics.jsonl", "events.jsonl", "config.toml")
    if not any((directory / name).exists() for name in names):
        raise UserError(f"{directory} has none of {', '.join(names)}: give the --output-dir of a run")
    run = RunFiles(directory=directory)
    for record in _records(directory / "metrics.jsonl", run.problems):
        # Anyone may have written the file: a bool is no step, and a larger number fits into no array.
        if type(record.get("step")) is int and abs(record["step"]) < 1 << 63:
            is_evaluation = any(key.startswith("eval/") for key in record)
            (run.evaluations if is_evaluation else run.steps).append(record)
    run.problems += _extreme_values([*run.steps, *run.evaluations])
    run.steps.sort(key=_step)
    run.evaluations.sort(key=_step)
    run.events += [e for e in _records(directory / "events.jsonl", run.problems) if isinstance(e.get("event"), str)]
    run.settings = _settings(directory / "config.toml", run.problems)
    run.hangs = sorted(path.name for path in directory.glob("hang-*.json"))
    run.is_running = _is_locked(directory / LOCK_NAME)
    return run


def lasting(events: Sequence[Record]) -> list[Record]:
    """The events that no later rollback undoes, in order. `events`: of a run, in order."""
    kept: list[Record] = []
    for event in events:
        if event["event"] == "rollback" and type(to_step := event.get("to_step")) is int:
            undone = ("skip", "spike", "rollback")
            kept = [e for e in kept if e["event"] not in undone or not _is_after(e, to_step)]
        kept.append(event)
    return kept


def _is_after(event: Record, step: int) -> bool:
    """Whether an event is of a later step; that of a rollback is the one that it returns to."""
    of = event.get("to_step" if event["event"] == "rollback" else "step")
    return type(of) is int and of > step


def require_readable(path: Path) -> None:
    """Refuse (ValueError) what is no regular file, or too large. Raises OSError where it cannot be looked at."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    if status.st_size > _LARGEST_BYTES[path.suffix]:
        raise ValueError(f"has {status.st_size:,} bytes, more than {_LARGEST_BYTES[path.suffix]:,}")


def _step(record: Record) -> int:
    return int(record["step"])


def _records(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; lines that are none are counted as a problem."""
    damaged = 0
    try:
        require_readable(path)
        with path.open("rb") as file:
            for _, record in json_lines(file):
                if record is None:
                    damaged += 1
                else:
                    yield record
    except FileNotFoundError:
        problems.append(f"{path.name} is not there")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path.name} {error}")
    if damaged:
        problems.append(
            f"{path.name} has {damaged} line{'s' * (damaged > 1)} that are no records, such as a cut-off one"
        )


def _extreme_values(records: Iterable[Record]) -> Iterator[str]:
    """The metrics with finite numbers that are too large to be drawn."""
    steps_of: dict[str, list[int]] = {}
    for record in records:
        for key, value in record.items():
            if type(value) in (float, int) and LARGEST < abs(value) < math.inf:
                steps_of.setdefault(key, []).append(record["step"])
    for key, steps in steps_of.items():
        numbers = counted(len(steps), "number")
        yield f"{key} has {numbers} beyond {LARGEST:g}, first in step {steps[0]}: left out of curves and figures"


def _settings(path: Path, problems: list[str]) -> Mapping[str, Mapping[str, Any]]:
    try:
        require_readable(path)
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: table for name, table in tables.items() if isinstance(table, dict)}
    except FileNotFoundError:
        problems.append(f"{path.name} is not there")
    # RecursionError: tables nested without end.
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    return {}


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock of the directory; it is let go at once."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Asking is locking: what is free is held until the file is closed below.
        take_lock(descriptor)
    except OSError:  # BlockingIOError: a run has it
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
