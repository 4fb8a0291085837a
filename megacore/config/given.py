"""What one source of settings, the command line or a file, gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ForeignSetting:
    """A setting of another trainer, as a command line or a file gives it.

    Attributes:
        origin: the trainer, or its file.
        source: the setting and its value, for messages.
        fields: that it sets.
        translate: from what else the run is given (megacore/arrive/translation.py). Raises ValueError for a value
            without a translation.
        where: precedes the source in messages.
        is_idle: it changes nothing here.
        is_last: it depends on what others become.
    """

    origin: str
    source: str
    fields: tuple[str, ...]
    translate: Callable[[Any], Any]
    where: str = ""
    is_idle: bool = False
    is_last: bool = False


@dataclass
class Given:
    """What one source, the command line or a file, sets.

    Attributes:
        values: values by field.
        problems: what is wrong with the source.
        unread: fields that the source sets to a value which could not be read.
        foreign: settings of other trainers, which become fields when they are translated.
        by_optimizer: parameters of --optimizer that are not read, as other sources say which it is.
        names: flags of the command line as they are spelled there.
        refused: other trainers' flags that are not accepted, by what to use instead.
        translated: settings of other trainers and the flags that they became, by where they come from.
        idle: settings that change nothing here, by where they come from.
        notes: what to tell the user about the source.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    foreign: list[ForeignSetting] = field(default_factory=list)
    by_optimizer: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    translated: dict[str, dict[str, str]] = field(default_factory=dict)
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
