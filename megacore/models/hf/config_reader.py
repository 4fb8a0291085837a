"""Reads a config.json field by field, so that every field of it is accounted for. A field is copied, or must have one
of a few values, or is known to change nothing. Any other is unknown: it may change the model, and who reads the file
decides what to do (`Family.describe`). All problems are collected: a user sees them at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.config import ExpertsConfig, ModelConfig
from megacore.config.fields import field_infos
from megacore.config.messages import one_of

_MISSING = object()


def _with_null(value: Any) -> Any:
    """TOML has no null: the text "null" stands for it."""
    if isinstance(value, dict):
        return {name: _with_null(one) for name, one in value.items()}
    return [_with_null(one) for one in value] if isinstance(value, list) else None if value == "null" else value


TABLES: dict[str, Any] = _with_null(
    tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
)
_ANY = TABLES["any_family"]
_WITHOUT_EFFECT = frozenset(_ANY["without_effect"].split())
_WITHOUT_EFFECT_PATTERN = re.compile(_ANY["without_effect_pattern"])
_WAYS_OUT: Mapping[str, str] = {
    "auto_map": "; if transformers has the model without this code, use --ignore-config-field auto_map",
}
# Transformers' names of activations -> megacore's; the first of each is written.
ACTIVATIONS = {
    "gelu": "gelu-exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}


class ConfigReader:
    """One config.json, and what is wrong with it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.problems: list[str] = []  # what megacore cannot represent
        self._values = values
        self._seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it stands, the default where it is missing; the caller judges it."""
        self._seen.add(name)
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        return name in self._values

    def first_of(self, names: Sequence[str]) -> str:
        """The name by which the file has a field; the first where it lacks it."""
        return next((name for name in names if name in self._values), names[0])

    def copied(self, ours: str, names: Sequence[str], default: Any) -> Any:
        """The value of a field that ModelConfig or ExpertsConfig has too, which must be of its type. `names`: what the
        file may call it; they must agree. `default`: what transformers takes without one."""
        info = (field_infos(ModelConfig) | field_infos(ExpertsConfig))[ours]
        given = [(name, self._values[name]) for name in names if name in self._values]
        self._seen.update(names)
        if not given:
            return default
        name, value = given[0]
        if any(other != value for _, other in given[1:]):
            self.problem(name, f"is {value!r}, but {given[1][0]} is {given[1][1]!r}")
        if value is None and info.optional:
            return None
        kinds = (int, float) if info.kind is float else (info.kind,)
        if type(value) not in kinds:
            self.problem(name, f"is {_shown(value)}, not {_KINDS[info.kind]}")
            return default
        return info.kind(value)

    def only(self, name: str, allowed: Sequence[Any], default: Any = _MISSING, *, way_out: str = "") -> None:
        """Refuse a field whose value, compared with its type, is not among those that mean what megacore computes.
        `default`: what transformers takes without one; by default a missing field is fine."""
        value = self.get(name, default)
        if value is not _MISSING and not any(type(value) is type(one) and value == one for one in allowed):
            known = one_of([_shown(one) for one in allowed])
            self.problem(name, f"is {_shown(value)}, but megacore has only {known}{way_out}")

    def problem(self, name: str, text: str) -> None:
        if (said := f"{self.where}: {name} {text}") not in self.problems:  # a field may be read into two of ours
            self.problems.append(said)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            self.problem(name, f"is {_shown(value)}, not true or false")
            return default
        return value

    def count(self, name: str, default: Any, of: str) -> int | None:
        """A field that is a whole number, one or more, or null; `of`: what it counts, for the message."""
        value = self.get(name, default)
        if value is not None and (type(value) is not int or value < 1):
            self.problem(name, f"is {str(value)[:40]!r}, not a number of {of}")
            return None
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or value <= 0:
            self.problem(name, f"is {str(value)[:40]!r}, not a positive number")
            return default
        return value

    def activation(self, name: str, default: str) -> str:
        """Megacore's name of an activation. `default`: what transformers takes where the file has none."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = one_of([_shown(one) for one in ACTIVATIONS])
            self.problem(name, f"is {_shown(value)}, but megacore has only {known}")
            value = default
        return ACTIVATIONS[value]

    def finish(self, ignored: frozenset[str]) -> tuple[str, ...]:
        """Account for every field that nobody has asked for, and return those that nothing is known of. `ignored`:
        fields of the family that do not change what the model computes."""
        for name, allowed in _ANY["if_given"].items():
            if name in self._values and name not in self._seen:
                self.only(name, allowed, way_out=_WAYS_OUT.get(name, ""))
        off = {name for name, values in _ANY["off"].items() if self._values.get(name) in values}
        left = self._values.keys() - self._seen - _WITHOUT_EFFECT - ignored - off
        return tuple(sorted(name for name in left if not _WITHOUT_EFFECT_PATTERN.fullmatch(name)))


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
