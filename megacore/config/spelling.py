"""How a field is spelled on a command line: as a flag, or as a parameter of another field's flag. A setting that means
something only together with another one is a parameter of its flag: `--rope-scaling yarn factor=4 no-truncate`.
parameters.toml lists them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megacore.config.messages import number

_SPELLED = re.compile(r"--([a-z][a-z0-9-]*)(?:( )([a-z0-9-]+)(=)?)?")
_SHORT = re.compile(r"(?<![\w-])(?:[a-z0-9-]+(?==)|[a-z0-9]+-[a-z0-9-]+)")
PARAMETERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    owner: {name: (fields,) if isinstance(fields, str) else tuple(fields) for name, fields in rows.items()}
    for owner, rows in tomllib.loads(Path(__file__).with_name("parameters.toml").read_text(encoding="utf-8")).items()
}
"""The parameters of a field's flag, each with its fields: one for each optimizer, where several have it."""
OWNERS = {
    field: (owner, name) for owner, rows in PARAMETERS.items() for name, fields in rows.items() for field in fields
}
"""Fields that are parameters, each with the field whose flag it follows, and its name there."""


def flag(field: str) -> str:
    """`num_layers` -> `--num-layers`, `rope_scaling_factor` -> `--rope-scaling factor`."""
    owner, parameter = OWNERS.get(field, (field, ""))
    return f"--{owner.replace('_', '-')} {parameter}".rstrip()


def field_and_text(spelled: str) -> tuple[str, str]:
    """The field that `--num-layers 12` or `--rope-scaling factor=4` sets, and its value as text. Where a parameter is
    one field for each optimizer, the first."""
    owner, _, words = spelled.removeprefix("--").partition(" ")
    name, _, text = words.partition("=")
    fields = PARAMETERS.get(owner.replace("-", "_"), {}).get(name)
    return (fields[0], text) if fields else (owner.replace("-", "_"), words)


def with_names(text: str, name: Callable[[str], str]) -> str:
    """A text with what `name` returns for its field in place of each flag, and of each parameter with its flag."""

    def named(match: re.Match[str]) -> str:
        owner, separator, parameter, equals = match[1].replace("-", "_"), match[2] or "", match[3] or "", match[4] or ""
        if fields := PARAMETERS.get(owner, {}).get(parameter.removeprefix("no-")):
            return name(fields[0]) + (" " if equals else "")
        return name(owner) + separator + parameter + equals

    return _SPELLED.sub(named, text)


def fields_in(text: str) -> set[str]:
    """The fields whose flags and parameters a text names."""
    found = set[str]()

    def name(field: str) -> str:
        found.add(field)
        return ""

    with_names(text, name)
    words = set(_SHORT.findall(text))  # `--rope-scaling low-freq-factor=4 must be below high-freq-factor=4`
    short = (rows for owner, rows in PARAMETERS.items() if f"--{owner.replace('_', '-')} " in text)
    return found | {rows[word][0] for rows in short for word in words & rows.keys()}


def is_shared(field: str) -> bool:
    """Whether a field is the parameter of one optimizer that is another field for another optimizer."""
    owner, name = OWNERS.get(field, (field, ""))
    return len(PARAMETERS.get(owner, {}).get(name, ())) > 1


def own_flag(field: str) -> str:
    """The flag that is spelled as the field itself: an alias of a parameter."""
    return "--" + field.replace("_", "-")


def negative(flag: str) -> str:
    """The form that turns a switch off: `--no-mock-data`, `--rope-scaling no-truncate`."""
    before, separator, name = flag.rpartition(" " if " " in flag else "--")
    return f"{before}{separator}no-{name}"


def with_value(flag: str, value: str) -> str:
    """`--num-layers 12`, `--rope-scaling factor=4`; other words are followed by the value too."""
    return f"{flag}{'=' if flag.startswith('--') and flag.count(' ') == 1 else ' '}{value}"


def flag_and_value(field: str, value: Any, *, own: bool = False) -> str:
    """A field on a command line: `--num-layers 12`, `--mock-data`, `--no-mock-data`, `--data-path A B`, `--dp None`;
    `own`: a parameter is spelled as its alias."""
    name = own_flag(field) if own else flag(field)
    if isinstance(value, bool):
        return name if value else negative(name)
    words = value if isinstance(value, list | tuple) else [value]
    shown = (number(word) if isinstance(word, int | float) else str(word) for word in words)
    return with_value(name, " ".join(shown))
