"""Turns settings of other trainers into fields, exactly or not at all. A setting may depend on what else the run is
given: a number of samples is steps of the batch size. `translate_settings` goes through them, those that depend on
others last. rows.py reads what each becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config.dimensions import degree_fields, fill_degrees, size_of_role
from megacore.config.fields import field_infos
from megacore.config.given import Given
from megacore.config.rampup import Ramp
from megacore.config.schema import Config, section_of
from megacore.config.spelling import flag_and_value


@dataclass(frozen=True)
class Translation:
    """The fields that a setting sets."""

    values: Mapping[str, Any] = field(default_factory=dict)  # what the setting says, by field
    # Values that follow from it, by field, where nothing else sets them.
    implied: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # fields whose values on the command line mean nothing beside the setting
    note: str = ""


class MissingField(ValueError):
    """A setting that has no translation while a field is not given."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Run:
    """What a translation may depend on."""

    config: Config  # the configuration before settings are translated
    world_size: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)  # what is given so far, by field
    # Settings of other trainers that are given, with their values as text.
    others: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> int | None:
        """A field that counts. None: not given, or an invalid value, which `validate` reports."""
        section = getattr(self.config, section_of(type(self.config), name))
        return _positive_number(self.settings.get(name, getattr(section, name)))

    @property
    def ramp(self) -> Ramp | None:
        """How the batch size grows; None where it does not, or is invalid."""
        return self.config.rampup.ramp()

    @property
    def replicas(self) -> int | None:
        """The number of data-parallel ranks; None where the degrees do not fit the number of processes."""
        degrees = {name: self.settings[name] for name in degree_fields() if name in self.settings}
        parallel = dataclasses.replace(self.config.parallel, **degrees)
        given = (getattr(parallel, name) for name in degree_fields())
        if any(degree is not None and _positive_number(degree) is None for degree in given):
            return None
        return size_of_role("batch", fill_degrees(parallel, self.world_size)) or None


def _positive_number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def translate_settings(given: Given, values: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Translates settings of other trainers that have the same meaning in another form into fields of `given`, or adds
    what is wrong with them. A setting that contradicts `values`, which all sources set together, is refused."""
    sources = {name: flag_and_value(name, value) for name, value in values.items()}
    others = {name: text for name, _, text in (setting.source.partition(" ") for setting in given.foreign)}
    implied: dict[str, Any] = {}
    became: dict[tuple[str, str], Translation] = {}
    for setting in sorted(given.foreign, key=lambda one: one.is_last):
        source = setting.source
        try:
            translation = setting.translate(Run(config, world_size, {**values, **given.values}, others))
        except ValueError as error:
            is_said = isinstance(error, MissingField) and error.name in given.unread
            if not is_said and (problem := f"{setting.where}{error}") not in given.problems:  # several may read a key
                given.problems.append(problem)
            given.unread.update(setting.fields)
            continue
        for name in translation.dropped:
            given.values.pop(name, None)
            sources.pop(name, None)
        given.notes += [f"{setting.where}{source}: {translation.note}"] if translation.note else []
        for name, value in translation.values.items():
            if name in sources and {**values, **given.values}[name] != value:
                given.problems.append(
                    f"{setting.where}{source} is {flag_and_value(name, value)}, and {sources[name]} is given as well: "
                    "keep one of them"
                )
                continue
            given.values[name], sources[name] = value, f"{setting.where}{source}"
        implied |= translation.implied
        if setting.is_idle:
            given.idle.setdefault(setting.origin, []).append(source)
        else:
            became[setting.origin, source] = translation
    if "schedule_csv" in values:
        implied.pop("schedule", None)
    if values.keys() & {"preset", "init_from_hf"}:  # which set the shape
        implied = {name: value for name, value in implied.items() if name not in field_infos(type(config.model))}
    given.values.update({k: v for k, v in implied.items() if k not in values and k not in given.values})
    every = {**values, **given.values}
    for (origin, source), translation in became.items():
        took_effect = [name for name, value in translation.implied.items() if every.get(name) == value]
        fields = [*(name for name in translation.values if name in every), *took_effect]
        # A later setting may have replaced what this one became.
        ours = ", ".join(flag_and_value(name, translation.values.get(name, every[name])) for name in fields)
        given.translated.setdefault(origin, {})[source] = ours
