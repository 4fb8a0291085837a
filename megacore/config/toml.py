"""The TOML form of a configuration: one table a section ([model], [parallel], ...), keys as fields.

Reading collects every problem with its place in the file; writing is atomic, and what is written reads back equal. A
key has one name and one table: dashes, aliases and keys outside their table are refused with the right spelling, so
that two files that mean the same look the same.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

import megacore
from megacore.config import Config, sections_of
from megacore.config.fields import FieldInfo, field_infos
from megacore.config.flags import Given, all_fields
from megacore.config.messages import did_you_mean, nearest_name, one_of

_HEADER = """\
# megacore {version}: the resolved configuration of a run. Give it back with --config, and override it with flags.
# Values that followed from others are written out: change what depends on them too, or delete their lines.

"""
_LARGEST_BYTES = 1 << 24
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string in quotes",
    tuple: 'an array of strings, such as ["data/a", "data/b"]',
}


def save_toml(config: Config, path: str | Path) -> None:
    """Writes a configuration so that `--config PATH` gives an equal one. The file appears whole or not at all."""
    path = Path(path)
    tables = {
        name: {key: value for key, value in dataclasses.asdict(getattr(config, name)).items() if value is not None}
        for name in sections_of(type(config))
    }
    text = _HEADER.format(version=megacore.__version__) + tomli_w.dumps(tables)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk is met without a name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def read_toml(path: str | Path, kind: type[Config] = Config) -> Given:
    """Reads the values of a TOML file of a kind of configuration by field, with every problem in it."""
    given = Given(unread=set(all_fields(kind)))  # until the file is read, nobody knows what it meant to give
    try:
        if problem := unsuitable(path):
            given.problems.append(f"--config {path} {problem}: give an existing TOML file")
            return given
        text = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        tables = tomllib.loads(text)
    except OSError as error:
        given.problems.append(f"--config {path} cannot be read: {error.strerror}: give an existing TOML file")
        return given
    except (ValueError, RecursionError) as error:
        given.problems.append(f"--config {path} is not valid TOML: {error}")
        return given
    given.unread = set()
    for name, table in tables.items():
        if name not in sections_of(kind):
            given.problems.append(f"{_place(path, text, None, name)}: {_unknown_table(kind, name, table)}")
            given.unread |= (
                {_meant(kind, name)} if not isinstance(table, dict) else set(all_fields(kind)) & table.keys()
            )
        elif not isinstance(table, dict):
            given.problems.append(
                f"{_place(path, text, None, name)}: {name} is a table: write [{name}] on its own line"
            )
        else:
            for key, value in table.items():
                _read_key(given, kind, partial(_place, path, text, name, key), (name, key), value)
    return given


def unsuitable(path: str | Path) -> str | None:
    """Why a path is no small file, whose reading would not end or take all memory; None where it is one.

    Raises:
        OSError: there is nothing of that name, or it cannot be asked.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
    if status.st_size > _LARGEST_BYTES:
        return f"has {status.st_size:,} bytes, more than the {_LARGEST_BYTES:,} that are read"
    return None


def _read_key(given: Given, kind: type[Config], place: Callable[[], str], name: tuple[str, str], value: Any) -> None:
    table, key = name
    info = field_infos(sections_of(kind)[table]).get(key)
    if info is None:
        given.problems.append(f"{place()}: [{table}] {_unknown_key(kind, key)}")
        given.unread.add(_meant(kind, key))
        return
    try:
        given.values[key] = _converted(value, info)
    except (TypeError, OverflowError):
        given.problems.append(f"{place()}: [{table}] {key} = {_shown(value)} must be {_EXPECTED[info.kind]}")
        given.unread.add(key)


def _converted(value: Any, info: FieldInfo) -> Any:
    """The value in its field's type; only a whole number for a number, and an array for a tuple, are converted.

    Raises:
        TypeError: the value has another type.
        OverflowError: the number is too large.
    """
    if info.kind is float and type(value) is int:
        return float(value)
    if info.kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is not info.kind:
        raise TypeError
    return value


def _unknown_table(kind: type[Config], name: str, value: Any) -> str:
    if name in all_fields(kind):
        return f"{name} belongs under [{_table_of(kind, name)}]"
    if not isinstance(value, dict):
        return _unknown_key(kind, name)
    tables = [f"[{section}]" for section in sections_of(kind)]
    return f"[{name}] is not a table: use {one_of(tables)}{did_you_mean(f'[{name}]', tables)}"


def _unknown_key(kind: type[Config], key: str) -> str:
    meant = _meant(kind, key)
    if meant not in all_fields(kind):
        return f"{key} is not a key: docs/configuration.md lists them"
    if meant == key:
        return f"{key} belongs under [{_table_of(kind, key)}]"
    return f"{key} is not a key: did you mean {meant}, under [{_table_of(kind, meant)}]?"


def _meant(kind: type[Config], key: str) -> str:
    """The field that a key with dashes, an alias or a misspelt key stands for; the key itself where none is near."""
    spellings = {
        name.removeprefix("--").replace("-", "_"): i.name for i in all_fields(kind).values() for name in i.flags
    }
    spelled = key.replace("-", "_")
    near = spelled if spelled in spellings else nearest_name(spelled, spellings)
    return spellings[near] if near else key


def _table_of(kind: type[Config], key: str) -> str:
    return next(name for name, section in sections_of(kind).items() if key in field_infos(section))


def _place(path: str | Path, text: str, table: str | None, key: str) -> str:
    """`FILE line 7`, or only the file where the line is written in an unusual way."""
    current = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*\"?([^\]\"]+?)\"?\s*\]", line):
            current = header[1]
            found = table is None and current == key
        else:
            found = current == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) is not None
        if found:
            return f"{path} line {number}"
    return str(path)


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
