"""The tables of cases.toml, for tests that do the same with each row: a row is a list of values, by its name or in an
array `rows`. A text that begins with = is an expression of names that the test has."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))


def cases(title: str, names: dict[str, Any]) -> dict[str, Any]:
    """The rows of a table by their names, or by their numbers."""
    table = TABLES[title]
    rows = dict(enumerate(table["rows"])) if "rows" in table else table
    return {str(name): tuple(_value(value, names) for value in row) for name, row in rows.items()}


def _value(value: Any, names: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("="):
        return eval(value[1:], names)
    return value
