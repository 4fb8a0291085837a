"""Reads the tables of another trainer's flags, such as megatron.toml: what each becomes, or why it changes nothing.

A row is data, and a flag whose value needs computing names a function. A flag is written as in a line of usage: --flag
is a switch, --flag X takes one value, and --flag X... any number.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megacore.arrive.translation import ForeignFlag, Shape, Translation, is_number, whole_number
from megacore.config.spelling import field_and_text

Translate = Callable[[str, str, Shape], Translation]
Flags = dict[str, ForeignFlag]
Function = TypeVar("Function", bound=Callable[..., Translation])


def read_tables(name: str) -> Mapping[str, Any]:
    """The tables of a file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def by_name(*functions: Function) -> dict[str, Function]:
    """Functions by what rows call them: their names without the underscore."""
    return {function.__name__.removeprefix("_"): function for function in functions}


def accepted_flags(tables: Mapping[str, Any], functions: Mapping[str, Translate]) -> Flags:
    """The flags that are translated or change nothing.

    Args:
        tables: `becomes`, `implies`, `computed`, `idle_at`, `off_at` and `idle`, or some of them.
        functions: those that rows of `computed` name.
    """
    readers = {"becomes": _same, "implies": _implied, "idle_at": _idle_at, "off_at": _off_at}
    found = computed_flags(tables.get("computed", {}), functions)
    for kind, read in readers.items():
        for usage, row in tables.get(kind, {}).items():
            found |= read(usage, row)
    for why, usages in tables.get("idle", {}).items():
        found |= _flags(usages, f"nothing: {why}", _nothing)
    return found


def computed_flags(rows: Mapping[str, Any], functions: Mapping[str, Translate]) -> Flags:
    """The flags that functions translate.

    Args:
        rows: of one table, by their flags.
        functions: those that the rows name.
    """
    found: Flags = {}
    for usages, row in rows.items():
        fields = row.get("sets", "").split()
        found |= _flags(usages, row["becomes"], functions[row["by"]], *fields, is_last=row.get("last", False))
    return found


def refused_flags(rows: Mapping[str, str]) -> dict[str, str]:
    """What to do instead of each flag.

    Args:
        rows: the flags by what to do instead.
    """
    return {flag: instead for instead, flags in rows.items() for flag in flags.split()}


def _flags(usages: str, becomes: str, translate: Translate, *fields: str, is_last: bool = False) -> Flags:
    """Flags that become the same. Those that set no field are idle."""
    found = {}
    for usage in re.split(", |\n", usages.strip()):
        flag, _, value = usage.partition(" ")
        found[flag] = ForeignFlag(
            becomes, fields, translate, not value, is_list=value.endswith("..."), is_idle=not fields, is_last=is_last
        )
    return found


def _nothing(flag: str, text: str, shape: Shape) -> Translation:
    return Translation()


def setting(ours: str) -> tuple[str, Any]:
    """The field and the value of a flag of megacore, such as --zero-stage 2 or --deterministic."""
    name, text = field_and_text(ours)
    value: Any = text or True
    if is_number(text):
        value = int(text) if text.isdecimal() else float(text)
    return name, value


def _same(usage: str, row: str | Mapping[str, str]) -> Flags:
    row = {"ours": row} if isinstance(row, str) else row
    name, value = setting(row["ours"])

    def translate(flag: str, text: str, shape: Shape) -> Translation:
        return Translation({name: whole_number(flag, text) if value == "N" else value})

    return _flags(usage, row.get("in_words", row["ours"].removesuffix("N").rstrip(" =")), translate, name)


def _implied(usage: str, row: str | Mapping[str, Any]) -> Flags:
    row = {"ours": row} if isinstance(row, str) else row
    name, value = setting(row["ours"])

    def translate(flag: str, text: str, shape: Shape) -> Translation:
        return Translation(implied={name: value})

    becomes = row.get("in_words", f"{row['ours']}, where nothing else is given")
    return _flags(usage, becomes, translate, name, is_last=row.get("last", False))


def _idle_at(usage: str, row: Mapping[str, str]) -> Flags:
    """A flag that changes nothing at some of its values, and is refused with others."""
    reasons = {value: why for value, why in row.items() if value != "otherwise"}

    def translate(flag: str, text: str, shape: Shape) -> Translation:
        if text not in reasons:
            raise ValueError(f"{flag} {text} has no counterpart: {row['otherwise']}")
        return Translation()

    return _flags(usage, f"nothing: {'; '.join(f'{value}: {why}' for value, why in reasons.items())}", translate)


def _off_at(usage: str, row: Mapping[str, str]) -> Flags:
    """A flag of a feature that is off at one value, however that number is written, and is refused with others."""
    off = row["off"]

    def translate(flag: str, text: str, shape: Shape) -> Translation:
        is_equal = is_number(text) and is_number(off) and float(text) == float(off)
        if text != off and not is_equal:
            raise ValueError(f"{flag} {text} has no counterpart: {row['otherwise']}")
        return Translation()

    return _flags(usage, f"nothing: with {off} as without it; any other value is refused", translate)
