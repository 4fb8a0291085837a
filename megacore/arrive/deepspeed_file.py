"""Reads a DeepSpeed configuration: a JSON file or a dictionary. Every key is translated or refused by name.
deepspeed_keys.toml says what each key becomes. Nothing of DeepSpeed is needed. A value "auto" means what it means in
transformers: the setting comes from the flags."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megacore.arrive.deepspeed import all_keys, tables
from megacore.arrive.rows import Document, Value, shown, value_at
from megacore.arrive.translation import Translation
from megacore.config.given import ForeignSetting, Given
from megacore.config.messages import did_you_mean, nearest_name
from megacore.config.toml import read_settings
from megacore.errors import UserError

_DEEPEST = 32
_FLAG = "--deepspeed-config"
_REFERENCE = "docs/guides/coming-from-deepspeed.md lists the keys"


def read_deepspeed(source: str | Path | Document, *, is_planned: bool = False) -> tuple[Given, Document]:
    """The settings of a configuration, a JSON file or what one contains, with every problem in it; and the
    configuration itself. `is_planned`: the run is only planned, so that a search (autotuning) is what the caller does
    anyway."""
    if isinstance(source, Mapping):
        return _read(source, "config", is_planned=is_planned)
    try:
        # json takes the last of repeated keys without a word.
        document = read_settings(source, "JSON", partial(json.loads, object_pairs_hook=_without_repeats))
        if not isinstance(document, dict):
            raise UserError("must hold an object, as in {}")
    except UserError as error:
        every = {name for key in all_keys().values() for name in key.fields}
        return Given(problems=[f"{_FLAG} {source} {error}"], unread=every), {}
    return _read(document, str(source), is_planned=is_planned)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for number, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:number]):
            raise ValueError(f"{name} is given twice: keep one of them")
    return found


def _read(document: Document, name: str, *, is_planned: bool) -> tuple[Given, Document]:
    document = {tables()["aliases"].get(key, key): value for key, value in document.items()}
    if isinstance(stage := document.get("zero_optimization"), bool):  # the form of DeepSpeed's first versions
        document["zero_optimization"] = {"stage": int(stage)}
    read = Given()
    left: list[str] = []
    off: list[str] = []
    for path, value in _leaves(document, read.problems, off, name):
        if value == "auto":
            left.append(path)
        elif not (is_planned and path == "autotuning.enabled"):
            read.foreign.append(_setting(path, value, document, name))
    if not any(value_at(document, f"{form}.enabled") in (True, "auto") for form in ("fp16", "bf16")):
        read.foreign.append(_fp32(name))
    if left:
        read.notes.append(f'left to the flags by {name} ("auto"): {", ".join(left)}')
    if off:
        read.notes.append(f"without effect in {name}: {', '.join(off)}")
    return read, document


def _leaves(
    document: Document, problems: list[str], off: list[str], name: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The known keys that have an effect, with their values. Unknown ones are noted as problems. Sections that are off
    by default, and hold keys, are noted in `off`. One that says that it is off may hold anything."""
    for word, value in document.items():
        path = f"{prefix}{word}"
        if isinstance(value, Mapping) and path in tables()["switched"]:
            switch, default = tables()["switched"][path]
            if value.get(switch, default) is False:
                if switch not in value and value:
                    off.append(f"{path} (needs {path}.{switch} true)")
                    deque(_leaves(value, problems, off, name, f"{path}."), maxlen=0)  # for the problems alone
                continue
        if path in all_keys():
            yield path, value
        elif not any(known.startswith(f"{path}.") for known in all_keys()) or path.count(".") > _DEEPEST:
            near = _did_you_mean(path, prefix)
            problems.append(f"{name}: {shown(path)} is not a key of DeepSpeed 0.19{near}: leave it out; {_REFERENCE}")
        elif not isinstance(value, Mapping):
            if value is not None:
                problems.append(f"{name}: {path} {shown(value)} must be an object, as in {{}}")
        else:
            yield from _leaves(value, problems, off, name, f"{path}.")


def _did_you_mean(path: str, prefix: str) -> str:
    """A near key of the same section, else of any."""
    siblings = (key.removeprefix(prefix) for key in all_keys() if key.startswith(prefix))
    near = nearest_name(path.removeprefix(prefix), siblings)
    return f" (did you mean {prefix}{near}?)" if near else did_you_mean(path, all_keys())


def _setting(path: str, value: Any, document: Document, name: str) -> ForeignSetting:
    key = all_keys()[path]
    return ForeignSetting(
        origin=name,
        source=f"{path} {shown(value)}",
        where=f"{name}: ",
        fields=key.fields,
        translate=lambda run: key.translate(Value(path, value, run, document)),
        is_idle=key.is_idle,
        is_last=key.is_last,
    )


def _fp32(name: str) -> ForeignSetting:
    """DeepSpeed trains in fp32 where the file enables neither 16-bit format."""
    return ForeignSetting(
        origin=name,
        source="without bf16 and fp16",
        where=f"{name}: ",
        fields=(),
        translate=lambda run: Translation(implied={"precision": "fp32"}),
    )
