"""What a command line asks about the settings of other trainers: which are theirs, and what they become here.
`megacore.arrive` answers. It is optional: a tree without it knows megacore's own flags, as `OtherTrainers` says. The
configuration asks here alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from megacore import has_ring
from megacore.config.fields import FieldInfo
from megacore.config.given import ForeignSetting, Given
from megacore.config.schema import Config


class ForeignValue(NamedTuple):
    """A value of megacore's that another trainer writes in another way."""

    origin: str
    value: Any


class OtherTrainers:
    """The questions, with the answers of a tree that knows no other trainer."""

    files: Mapping[str, FieldInfo] = {}  # flags that name another trainer's file of settings

    def setting_of(self, flag: str, words: Sequence[str]) -> ForeignSetting | None:
        """The setting that a flag with its values is; None for flags of megacore, and for those that are refused."""
        return None

    def value_of(self, name: str, flag: str, words: Sequence[str]) -> ForeignValue | None:
        """What the values of a flag of megacore mean in another trainer; None: what they mean here. Raises ValueError
        where there is no counterpart, with what comes nearest."""
        return None

    def advice(self, flag: str) -> str | None:
        """What to use instead of another trainer's flag; None for flags that are accepted, or of nobody."""
        return None

    def name_of(self, flag: str, words: Sequence[str]) -> str | None:
        """What a flag that is refused is called here, with its values; None: no trainer is known to have it."""
        return None

    def refusal(self, flags: Sequence[str], advice: str) -> str:
        """The problem with flags that have the same advice, which `advice` gave."""
        raise NotImplementedError

    def help_of(self, flag: str) -> str | None:
        """What `--help` says of another trainer's flag; None for other flags."""
        return None

    def adjust(self, flags: Given, *, is_planned: bool) -> list[str]:
        """Give the values of a whole command line the meaning that they have in the trainer whose script it is, and
        read the trainer's file of settings. What is wrong with it goes into `flags`; returns notes for the user."""
        return []

    def defaults(self, flags: Given, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The defaults of the trainer whose script a command line is, by megacore's field."""
        return {}

    def note_of_defaults(self, flags: Given, defaults: str) -> str:
        """The note on the defaults of another trainer that a command line has."""
        return defaults

    def translate(self, flags: Given, of_file: Mapping[str, Any], build: Callable[[], Config], world_size: int) -> None:
        """Turn the settings of other trainers into fields, and leave out what they do not read. `of_file` has the
        values of --config; `build` makes the configuration of all sources, as far as they are translated."""

    def translate_settings(self, given: Given, values: Mapping[str, Any], config: Config, world_size: int) -> None:
        """Turn given settings into fields, without the rules for whole scripts. A setting that contradicts `values`,
        which all sources set together, is refused."""

    def settings_of_search(self, path: str) -> tuple[Sequence[ForeignSetting], Sequence[str]]:
        """The settings of another trainer's file for a search of layouts, and what is wrong with them there."""
        return (), ()


@functools.cache
def other_trainers() -> OtherTrainers:
    """Those of `megacore.arrive`, where it is installed."""
    if not has_ring("arrive"):
        return OtherTrainers()
    return cast(OtherTrainers, importlib.import_module("megacore.arrive.command_line").OTHER_TRAINERS)
