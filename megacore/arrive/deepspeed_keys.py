"""Every key of a DeepSpeed 0.19 configuration, and what it becomes here.

A key sets fields, changes nothing, or is accepted with some values and refused with others, because megacore would
compute something else. deepspeed_keys.toml lists them; the functions that its rows name are in deepspeed_batches.py,
deepspeed_layout.py, deepspeed_measurements.py, deepspeed_training.py and deepspeed_zero.py. deepspeed.py reads files
with the table, and `tools/deepspeed_reference.py` writes it into docs/guides/coming-from-deepspeed.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from megacore.arrive.deepspeed_batches import BATCHES
from megacore.arrive.deepspeed_layout import LAYOUT
from megacore.arrive.deepspeed_measurements import MEASUREMENTS
from megacore.arrive.deepspeed_training import OPTIMIZER, optimizer_type
from megacore.arrive.deepspeed_values import Key, Translate, Value, a_text, real, shown, switch, whole
from megacore.arrive.deepspeed_zero import ZERO
from megacore.arrive.tables import read_tables, setting
from megacore.arrive.translation import Translation
from megacore.config.messages import one_of

_FUNCTIONS: Mapping[str, Translate] = {**BATCHES, **LAYOUT, **MEASUREMENTS, **OPTIMIZER, **ZERO}
_REMOVED = "DeepSpeed 0.19 has removed it"


@functools.cache  # only a run with a DeepSpeed configuration reads the file
def tables() -> Mapping[str, Any]:
    """The file. `switched` are the sections that are off unless a key of theirs says otherwise, with that key and its
    default; `aliases` are other names of sections."""
    return read_tables("deepspeed_keys.toml")


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """What each key becomes, by its path."""
    kinds = {"sets": _sets, "on": _on, "computed": _computed, "checked": _checked, "accepted": _accepted}
    found = {path: read(row) for kind, read in kinds.items() for path, row in tables()[kind].items()}
    found |= {path: _removed(path) for path in tables()["removed"]["keys"].split()}
    idle = tables()["idle"].items()
    return found | {path: Key(kind="idle", becomes=why) for why, paths in idle for path in paths.split()}


def _reader(kind: str) -> Callable[[Value], Any]:
    """Reads a value of a kind, such as "whole 1 or null": a whole number of at least 1, or None."""
    name, _, low = kind.removesuffix(" or null").partition(" ")
    simple: Mapping[str, Callable[[Value], Any]] = {"real": real, "switch": switch, "text": a_text}

    def read(value: Value) -> Any:
        if name == "anything" or (value.value is None and kind.endswith(" or null")):
            return value.value
        return whole(value, low=int(low or 0)) if name == "whole" else simple[name](value)

    return read


def _sets(row: Mapping[str, Any]) -> Key:
    """A key that sets one field to its value."""
    (name, _), read, skips, kinds = setting(row["ours"]), _reader(row["reads"]), row.get("skips"), row.get("of", "")

    def translate(value: Value) -> Translation:
        if kinds and optimizer_type(value) not in kinds.lower().split():
            raise ValueError(f"{value} is of {one_of(kinds.split())}: leave it out")
        given = read(value)
        return Translation({} if given in (None, skips) else {name: given})

    usual = row["ours"] if skips is None else f"{row['ours']}; nothing with {skips}"
    return Key(kind="sets", becomes=row.get("in_words", usual), fields=(name,), translate=translate)


def _on(row: str | Mapping[str, str]) -> Key:
    """A switch that sets fields where it is on, and nothing where it is off."""
    row = {"ours": row} if isinstance(row, str) else row
    values = dict(setting(ours) for ours in row["ours"].split(", "))

    def translate(value: Value) -> Translation:
        return Translation(values if switch(value) else {})

    return Key(kind="sets", becomes=row.get("in_words", row["ours"]), fields=tuple(values), translate=translate)


def _computed(row: Mapping[str, Any]) -> Key:
    fields, function = tuple(row.get("sets", "").split()), _FUNCTIONS[row["by"]]
    return Key(kind="sets", becomes=row["becomes"], fields=fields, translate=function, is_last=row.get("last", False))


def _checked(row: Mapping[str, str]) -> Key:
    """A key whose value another key uses."""
    read = _reader(row["reads"])

    def translate(value: Value) -> Translation:
        read(value)
        return Translation()

    return Key(kind="sets", becomes=row["becomes"], translate=translate)


def _accepted(row: Mapping[str, str]) -> Key:
    """A key that is refused with any value that is not accepted."""
    accepted, why, instead = json.loads(f"[{row['accepts']}]"), row["why"], row["otherwise"]

    def translate(value: Value) -> Translation:
        if not any(value.value == one and isinstance(value.value, bool) == isinstance(one, bool) for one in accepted):
            raise ValueError(f"{value}: {why}: {instead}")
        return Translation()

    values = one_of(list(dict.fromkeys(shown(one) for one in accepted)))  # 0 and 0.0 are shown alike
    return Key(kind="some", becomes=f"{values}; {why}: {instead}", translate=translate)


def _removed(path: str) -> Key:
    def translate(value: Value) -> Translation:
        off = value.value in (None, False, {}) or (
            isinstance(value.value, Mapping) and value.value.get("enabled", True) is False
        )
        if not off:
            raise ValueError(f"{path} {shown(value.value)}: {_REMOVED}, and megacore has no such feature: leave it out")
        return Translation()

    return Key(kind="some", becomes=f"false, null or not enabled; {_REMOVED}", translate=translate)
