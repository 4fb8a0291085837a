"""What one source of settings, the command line or a file, gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ForeignSetting:
    """A setting of another trainer, as a command line or a file gives it."""

    origin: str  # the trainer, or its file
    source: str  # the setting and its value, for messages
    fields: tuple[str, ...]
    # From what else the run is given (megacore/arrive/translation.py). Raises ValueError for a value without a
    # translation.
    translate: Callable[[Any], Any]
    where: str = ""  # precedes the source in messages
    is_idle: bool = False  # it changes nothing here
    is_last: bool = False  # it depends on what others become


@dataclass
class Given:
    """What one source, the command line or a file, sets."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # fields that the source sets to a value which could not be read
    # Settings of other trainers, which become fields when they are translated.
    foreign: list[ForeignSetting] = field(default_factory=list)
    # Parameters of --optimizer that are not read, as other sources say which it is.
    by_optimizer: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # flags of the command line as they are spelled there
    # Other trainers' flags that are not accepted, by what to use instead.
    refused: dict[str, list[str]] = field(default_factory=dict)
    # Settings of other trainers and the flags that they became, by where they come from.
    translated: dict[str, dict[str, str]] = field(default_factory=dict)
    # Settings that change nothing here, by where they come from.
    idle: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def translation_notes(self) -> list[str]:
        """A note with the settings of each other trainer that were translated, and one with those that change
        nothing."""
        notes = []
        for origin, translated in self.translated.items():
            if became := "; ".join(f"{source} -> {ours}" for source, ours in translated.items() if ours):
                notes.append(f"translated from {origin}: {became}")
        return notes + [f"{origin}'s, and without effect here: {', '.join(idle)}" for origin, idle in self.idle.items()]
