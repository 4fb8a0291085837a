"""The TOML form of a configuration: one table per section ([model], [parallel], ...), keys named as the fields. Every
problem is collected, with its line. Writing is atomic, and what is written reads back equal. Dashes, aliases and keys
outside their table are refused with the right spelling, so that two files with the same meaning look the same."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

import megacore
from megacore.config.fields import FieldInfo, field_infos
from megacore.config.flags import all_fields
from megacore.config.given import Given
from megacore.config.messages import did_you_mean, nearest_name, one_of, shortened
from megacore.config.schema import Config, section_of, sections_of
from megacore.errors import ConfigError, UserError
from megacore.files import replace_bytes, unreadable

T = TypeVar("T")
_HEADER = """\
# megacore {version}: the resolved configuration of a run. Give it back with --config, and override it with flags.
# Values that followed from others are written out: change what depends on them too, or delete their lines.

"""
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string in quotes",
    tuple: 'an array of strings, such as ["data/a", "data/b"]',
}


def save_toml(config: Config, path: str | Path) -> None:
    """Writes a configuration so that `--config PATH` reads an equal one. The file is replaced atomically. Raises
    ConfigError where a name in it is not valid UTF-8, which TOML cannot hold."""
    path = Path(path)
    tables = {
        name: {key: value for key, value in getattr(config, name).as_written().items() if value is not None}
        for name in sections_of(type(config))
    }
    text = _HEADER.format(version=megacore.__version__) + tomli_w.dumps(tables)
    try:
        content = text.encode()
    except UnicodeEncodeError:  # a name of a file that came from the system
        sections = [getattr(config, name) for name in tables]
        raise ConfigError([wrong for section in sections for wrong in section.wrong_fields().values()]) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, content)


def read_toml(path: str | Path, kind: type[Config] = Config) -> Given:
    """The values of a TOML file by field, and every problem in it."""
    given = Given(unread=set(all_fields(kind)))  # until the file is read, it may set any of them
    try:
        text, tables = read_settings(path, "TOML", _text_and_tables)
    except UserError as error:
        given.problems.append(f"--config {path} {error}")
        return given
    given.unread = set()
    tables_of: dict[str, str] = {}  # of each key that was read
    for name, table in tables.items():
        where = partial(_where, path, text)
        if name not in sections_of(kind):
            given.problems.append(f"{where(None, name)}: {_unknown_table(kind, name, table)}")
            fields = set(all_fields(kind)) & table.keys() if isinstance(table, dict) else {_nearest_field(kind, name)}
            given.unread |= fields
        elif not isinstance(table, dict):
            given.problems.append(f"{where(None, name)}: {name} is a table: write [{name}] on a separate line")
        else:
            for key, value in table.items():
                other = tables_of.setdefault(key, name)
                if other != name and _field(kind, name, key) is not None:
                    given.problems.append(f"{where(name, key)}: {key} is under [{other}] and under [{name}]: keep one")
                _read_key(given, kind, partial(where, name, key), (name, key), value)
    return given


def _text_and_tables(text: str) -> tuple[str, dict[str, Any]]:
    text = text.replace("\r\n", "\n")
    return text, tomllib.loads(text)


def read_settings(path: str | Path, form: str, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the text of a file. Raises UserError with what is wrong with it, which follows its name."""
    try:
        if (problem := unreadable(path)) is None:
            # Some editors begin a file with a byte-order mark.
            return parse(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not valid {form}: {error}") from error
    raise UserError(f"{problem}: use an existing {form} file")


def _read_key(given: Given, kind: type[Config], where: Callable[[], str], name: tuple[str, str], value: Any) -> None:
    table, key = name
    key = sections_of(kind)[table].former_names.get(key, key)
    info = _field(kind, table, key)
    if info is None:
        given.problems.append(f"{where()}: [{table}] {_unknown_key(kind, key)}")
        given.unread.add(_nearest_field(kind, key))
        return
    try:
        given.values[key] = _converted(value, info)
    except (TypeError, OverflowError):
        given.problems.append(f"{where()}: [{table}] {key} = {_shown(value)} must be {_EXPECTED[info.kind]}")
        given.unread.add(key)


def _field(kind: type[Config], table: str, key: str) -> FieldInfo | None:
    """The field of a key, also where a file of an earlier version has it under another table; None: there is none."""
    tables = {name for name, section in sections_of(kind).items() if section.earlier_table == table}
    infos = (field_infos(sections_of(kind)[name]) for name in (table, *sorted(tables)))
    return next((fields[key] for fields in infos if key in fields), None)


def _converted(value: Any, info: FieldInfo) -> Any:
    """The value in its field's type. Raises TypeError or OverflowError."""
    # TOML has 1 and 1.0, and users write either. `type`, as a bool would pass for an int.
    if info.kind is float and type(value) is int:
        return float(value)
    if info.kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is not info.kind:
        raise TypeError
    return value


def _unknown_table(kind: type[Config], name: str, value: Any) -> str:
    if name in all_fields(kind):
        return f"{name} belongs under [{section_of(kind, name)}]"
    if not isinstance(value, dict):
        return _unknown_key(kind, name)
    tables = [f"[{section}]" for section in sections_of(kind)]
    return f"[{name}] is not a table: use {one_of(tables)}{did_you_mean(f'[{name}]', tables)}"


def _unknown_key(kind: type[Config], key: str) -> str:
    name = _nearest_field(kind, key)
    if name not in all_fields(kind):
        return f"{key} is not a key: docs/reference/configuration.md lists them"
    if name == key:
        return f"{key} belongs under [{section_of(kind, key)}]"
    return f"{key} is not a key: did you mean {name}, under [{section_of(kind, name)}]?"


def _nearest_field(kind: type[Config], key: str) -> str:
    """The field that a key with dashes, an alias or a misspelt key probably means; the key itself if none is near."""
    spellings = {
        name.removeprefix("--").replace("-", "_"): i.name for i in all_fields(kind).values() for name in i.flags
    }
    spelled = key.replace("-", "_")
    near = spelled if spelled in spellings else nearest_name(spelled, spellings)
    return spellings[near] if near else key


def _where(path: str | Path, text: str, table: str | None, key: str) -> str:
    """`FILE line 7`, or only the file if the line is written in an unusual way."""
    current = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*\"?([^\]\"]+?)\"?\s*\]", line):
            current = header[1]
            is_key = table is None and current == key
        else:
            is_key = current == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) is not None
        if is_key:
            return f"{path} line {number}"
    return str(path)


def _shown(value: Any) -> str:
    return shortened(str(value).lower() if isinstance(value, bool) else repr(value))
