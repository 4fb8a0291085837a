"""Reads the tables of other trainers' settings: what each flag of Megatron-LM and each key of DeepSpeed becomes.

A row is data, and one whose value needs computing names a function. A flag is written as in a line of usage: --flag is
a switch, --flag X takes one value, and --flag X... any number. Tables of a file:

* `is`: the flags of megacore that say the same. One in parentheses holds where nothing else sets it, and N stands for
  the setting's own value, which is as `reads` says: whole (and its least value), float, which is the same as a number
  with a fraction, real, text, switch, or off, a switch turned around; what is `or null` sets nothing with null, nor
  does what `skips` names. It is refused beside the flag `unless`, which says the opposite.
* `at`: settings that are accepted with some values. A table `is` says what each becomes; a list `accepts`, as JSON has
  it, those that change nothing. `never`: values with reasons of their own. Any other value is refused: `why`, and what
  to do `otherwise`; or as unknown, with what may be used besides (`or`).
* `computed`: `by` a function, whose name it has without the underscore, and which `sets` fields.
* `checked`: settings that another one uses, so that only their kind is checked.
* `idle`: why settings change nothing, and the settings.
* `removed`: the same for settings that are accepted where they are off.

`becomes` and `in_words` are what the documentation and --help say; `last` rows depend on what others become.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megacore.arrive.translation import Run, Translation
from megacore.config.messages import did_you_mean, number, one_of, shortened
from megacore.config.numbers import is_number, nearest_ints, parse_float, parse_int
from megacore.config.spelling import field_and_text

Document = Mapping[str, Any]
Row = Mapping[str, Any]
_MOST = 2**63


@dataclass(frozen=True)
class Value:
    """A setting's value, and what it may depend on."""

    name: str  # --flag, or the path of a key: `zero_optimization.stage`
    value: Any  # the text of a flag, "" for a switch; of a key, as JSON has it
    run: Run  # that is set
    document: Document = field(default_factory=dict)  # the file of a key

    def __str__(self) -> str:
        return f"{self.name} {self.value}".rstrip() if self.is_flag else f"{self.name} {shown(self.value)}"

    @property
    def is_flag(self) -> bool:
        """Whether it is a flag of a command line."""
        return self.name.startswith("--")

    @property
    def quoted(self) -> str:
        """The setting with its value, of which a text is told from a number."""
        if self.is_flag:
            return f"{self.name} '{self.value}'"
        is_text = self.value and isinstance(self.value, str)
        return f'{self.name} "{shown(self.value)}"' if is_text else str(self)

    def key(self, path: str, default: Any = None) -> Value:
        """Another key of the file; with the default where the file leaves it out or says "auto"."""
        found = value_at(self.document, path)
        return Value(path, default if found is None or found == "auto" else found, self.run, self.document)

    def other(self, path: str, default: Any = None) -> Any:
        """The value of another key of the file."""
        return self.key(path, default).value


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A setting of another trainer: what it becomes, in words and as a function of its value."""

    becomes: str
    fields: tuple[str, ...] = ()  # that it may set
    # Raises ValueError for a value that has no translation.
    translate: Callable[[Value], Translation] = field(default=lambda value: Translation())
    # Sets fields; idle: changes nothing; some: is accepted with some values.
    kind: Literal["sets", "idle", "some"] = "sets"
    is_switch: bool = False  # it is a flag that takes no value
    is_list: bool = False  # it takes any number of values, which `translate` gets with blanks between
    is_last: bool = False  # it depends on what others become

    @property
    def is_idle(self) -> bool:
        """Whether it changes nothing here."""
        return self.kind == "idle"


# ---- values ----------------------------------------------------------------------------------------------------------


def value_at(document: Document, path: str) -> Any:
    """The value of a key; None where the file leaves it out."""
    found: Any = document
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def shown(value: Any) -> str:
    """A value as a file has it; a text without its quotation marks."""
    if isinstance(value, str):
        text = value or '""'
    elif isinstance(value, int | float) and not isinstance(value, bool):
        text = number(value)
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return shortened(text)


def _example(value: Value, example: float) -> str:
    """What to use in place of what is no number."""
    text = value.value.strip() if isinstance(value.value, str) and not value.is_flag else ""
    try:
        float(text)
    except ValueError:
        return f"use, for example, {number(example)}"
    return f"use {text}, without quotation marks"


def whole(value: Value, low: int = 0) -> int:
    """A value that is a whole number of at least `low`; 5e8 of a file is one too. Raises ValueError where it is
    none."""
    given = value.value
    if value.is_flag:
        with contextlib.suppress(ValueError):
            given = parse_int(given)
    meant = [n for n in nearest_ints(given) if low <= n <= _MOST] if isinstance(given, str) else []
    example = meant[0] if meant else 2 if value.is_flag else max(low, 1)
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1 or given < low:
        raise ValueError(f"{value.quoted} is not a whole number of {low} or more: {_example(value, example)}")
    if given > _MOST:
        raise ValueError(f"{value.name} has {len(str(int(given)))} digits: {_example(value, example)}")
    return int(given)


def real(value: Value, example: float = 0.1) -> float:
    """A value of a file that is a finite number; else ValueError."""
    given = value.value
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= sys.float_info.max:
        raise ValueError(f"{value.quoted} is not a number: {_example(value, example)}")
    return float(given)


def switch(value: Value) -> bool:
    """A value of a file that is true or false; else ValueError."""
    if not isinstance(value.value, bool):
        raise ValueError(f"{value.quoted} must be true or false")
    return value.value


def text(value: Value) -> str:
    """A value of a file that is a text with letters; else ValueError."""
    if not isinstance(value.value, str) or not value.value.strip():
        raise ValueError(f"{value} is not a text: leave it out, or use a name")
    return value.value


def bucket_mib(value: Value) -> float:
    """The size in MiB of a bucket of so many gradients in fp32; a flag may have the number as 5e8."""
    elements = (parse_float(value.value) if is_number(value.value) else 0.0) if value.is_flag else whole(value, 1)
    if not 1 <= elements < _MOST:
        raise ValueError(f"{value.quoted} is not a number of elements: use, for example, 500000000")
    return float(f"{elements * 4 / (1 << 20):.6g}")


_READERS: Mapping[str, Callable[[Value], Any]] = {
    "bucket": bucket_mib,
    "real": real,
    "switch": switch,
    "off": lambda value: not switch(value),
    "text": text,
    "anything": lambda value: value.value,
}


_NOTHING = object()


def _read(value: Value, row: Row) -> Any:
    """The value as the row reads it; None: it sets nothing."""
    reads, skips = row.get("reads", "whole 1"), row.get("skips", _NOTHING)
    kind, _, low = reads.removesuffix(" or null").partition(" ")
    if (value.value is None and reads.endswith(" or null")) or _is(value.value, skips):
        return None
    given = whole(value, int(low or 0)) if kind in ("whole", "float") else _READERS[kind](value)
    return None if _is(given, skips) else float(given) if kind == "float" else given


def _is(value: Any, one: Any) -> bool:
    """Whether a value is another one; 1 is not true."""
    return value == one and isinstance(value, bool) == isinstance(one, bool)


# ---- rows ------------------------------------------------------------------------------------------------------------


def read_tables(name: str) -> Mapping[str, Any]:
    """The tables of a file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def read_rows(tables: Mapping[str, Any], functions: Mapping[str, Any]) -> dict[str, Foreign]:
    """The settings that are translated or change nothing, by their names. `tables`: of the file, some of those
    above."""
    readers: Mapping[str, Callable[[Row], Foreign]] = {
        "is": _same,
        "computed": lambda row: _computed(row, functions),
        "checked": lambda row: _same({**row, "ours": "", "in_words": row["becomes"]}),
        "at": _at_values,
    }
    found: dict[str, Foreign] = {}
    for table, read in readers.items():
        for usages, row in tables.get(table, {}).items():
            found |= _named(usages, read(row if isinstance(row, Mapping) else {"ours": row}))
    for why, usages in tables.get("idle", {}).items():
        found |= _named(usages, Foreign(kind="idle", becomes=why))
    for why, usages in tables.get("removed", {}).items():
        found |= _named(usages, Foreign(kind="some", becomes=f"false, null or not enabled; {why}", translate=_off(why)))
    return found


def refused_flags(rows: Mapping[str, str]) -> dict[str, str]:
    """What to do instead of each flag, of rows that have the flags by what to do instead."""
    return {flag: instead for instead, flags in rows.items() for flag in flags.split()}


def _named(usages: str, foreign: Foreign) -> dict[str, Foreign]:
    """Settings that become the same, by their names."""
    found: dict[str, Foreign] = {}
    for usage in re.split(", |\n", usages.strip()):
        name, _, words = usage.partition(" ")
        found[name] = foreign
        if name.startswith("--"):
            is_idle = not foreign.fields
            becomes = f"nothing: {foreign.becomes}" if foreign.kind == "idle" else foreign.becomes
            found[name] = replace(
                foreign,
                kind="idle" if is_idle else foreign.kind,
                becomes=becomes,
                is_switch=not words,
                is_list=words.endswith("..."),
            )
    return found


def _settings(text: str) -> Translation:
    """The fields that `--recompute full, (--offload-optimizer)` sets, the second where nothing else does."""
    values: dict[str, Any] = {}
    implied: dict[str, Any] = {}
    for ours in text.split(", ") if text else ():
        name, word = field_and_text(ours.strip("()"))
        value: Any = word or True
        if is_number(word):
            value = int(word) if word.isdecimal() else float(word)
        (implied if ours.startswith("(") else values)[name] = value
    return Translation(values, implied)


def _same(row: Row) -> Foreign:
    becomes, unless = _settings(row["ours"]), _settings(row.get("unless", ""))
    types = row.get("of", "").split()
    has_value = "reads" in row or "N" in (*becomes.values.values(), *becomes.implied.values())

    def translate(value: Value) -> Translation:
        if types and str(value.other("optimizer.type")).lower() not in row["of"].lower().split():
            raise ValueError(f"{value} is of {one_of(types)}: leave it out")
        if any(value.run.settings.get(name) == given for name, given in unless.values.items()):
            ours = row["ours"].strip("()")
            raise ValueError(f"{value} is {ours}, and {row['unless']} is given as well: keep one of them")
        if not has_value:
            return becomes if value.is_flag or switch(value) else Translation()
        if (given := _read(value, row)) is None:
            return Translation()
        values, implied = (
            {name: given if ours == "N" else ours for name, ours in fields.items()}
            for fields in (becomes.values, becomes.implied)
        )
        return Translation(values, implied)

    words = re.sub("[ =]N", "", row["ours"])
    if not becomes.values:
        words = f"{words.strip('()')}, where nothing else is given"
    words += f"; nothing with {row['skips']}" if "skips" in row else ""
    return Foreign(
        becomes=row.get("in_words", words),
        fields=(*becomes.values, *becomes.implied),
        translate=translate,
        is_last=row.get("last", False),
    )


def _at_values(row: Row) -> Foreign:
    """A setting that is accepted with some values, however a number of a command line is written."""
    accepted = [(one, Translation()) for one in json.loads(f"[{row.get('accepts', '')}]")]
    accepted += [(_parsed(text), _settings(ours)) for text, ours in row.get("is", {}).items()]

    def translate(value: Value) -> Translation:
        given = float(value.value) if value.is_flag and is_number(value.value) else value.value
        for one, becomes in accepted:
            if _is(given, one):
                return becomes
        raise ValueError(f"{value}{_refusal(value, row)}")

    values = one_of(list(dict.fromkeys(shown(one) for one, _ in accepted)))  # 0 and 0.0 are shown alike
    words = f"nothing: with {values} as without it; any other value is refused"
    if "why" in row:
        words = f"{values}; {row['why']}: {row['otherwise']}"
    fields = dict.fromkeys(name for _, becomes in accepted for name in (*becomes.values, *becomes.implied))
    kind: Literal["sets", "some"] = "sets" if "becomes" in row else "some"
    return Foreign(becomes=row.get("becomes", words), fields=tuple(fields), translate=translate, kind=kind)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refusal(value: Value, row: Row) -> str:
    if why := row.get("never", {}).get(str(value.value)):
        return f": {why}"
    if "otherwise" in row:
        return f": {row['why']}: {row['otherwise']}" if "why" in row else f" has no counterpart: {row['otherwise']}"
    known = list(row["is"])
    near, besides = did_you_mean(str(value.value), known), f", or {row['or']}" if "or" in row else ""
    return f" is not known: use {one_of(known)}{near}{besides}"


def _computed(row: Row, functions: Mapping[str, Any]) -> Foreign:
    return Foreign(
        becomes=row["becomes"],
        fields=tuple(row.get("sets", "").split()),
        translate=functions[f"_{row['by']}"],
        is_last=row.get("last", False),
    )


def _off(why: str) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        is_off = isinstance(value.value, Mapping) and value.value.get("enabled", True) is False
        if not is_off and value.value not in (None, False, {}):
            raise ValueError(f"{value}: {why}, and megacore has no such feature: leave it out")
        return Translation()

    return translate
