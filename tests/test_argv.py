"""Every row of argv.toml: what a command line gives, or what is said about it.

A table of argv.toml is a subject. Its plain values count for its rows, which hold:

    words      the command line; `plain` of the table comes before it, and before `equals`
    ranks      processes of the run (1)
    program    pretrain_gpt.py, or pretrain_bert.py
    files      name -> text of files in the working directory; a name that ends in / is a directory
    file, text one of them, of which the table names the file and each row has its text
    saved      the command line whose configuration is in config.toml
    variables  further ones of the environment
    says       the problems of a refusal, all of them and whole; of an accepted line (`status = 0`), its notes;
               ... stands for any words
    some       whether there are more sentences than these
    equals     the command line that gives the same configuration, or its values by field
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.config import Config, ResolvedConfig, sections_of
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.spelling import OWNERS, PARAMETERS, negative, own_flag
from megacore.config.toml import save_toml
from tests.unit.refusals import proposals

Row = dict[str, Any]
TABLES: dict[str, Row] = tomllib.loads(Path(__file__).with_name("argv.toml").read_text(encoding="utf-8"))
KINDS: dict[str, Any] = {"pretrain_gpt.py": Config, "pretrain_bert.py": BertConfig}


@dataclass(kw_only=True)
class Answer:
    """What comes of a command line: a configuration and notes, or problems and lines that explain them."""

    config: ResolvedConfig | None
    sentences: list[str]
    explained: list[str] = field(default_factory=list)


def rows_of(subject: str) -> Iterator[Row]:
    """The rows of a table, each with what the table says for all."""
    plain = {name: value for name, value in TABLES[subject].items() if name != "rows"}
    for row in TABLES[subject]["rows"]:
        yield {"plain": "", "words": "", "program": "pretrain_gpt.py", "ranks": 1, **plain, **row}


def answer(row: Row, words: str) -> Answer:
    """Parse a command line in this process as rank 0 of a row's run, in the working directory."""
    ranks = {"RANK": "0", "WORLD_SIZE": str(row["ranks"]), "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    argv, said = shlex.split(f"{row['plain']} {words}"), io.StringIO()
    with mock.patch.dict("os.environ", {**ranks, **row.get("variables", {})}), contextlib.redirect_stderr(said):
        try:
            config = parse_config(argv, prog=row["program"], description="", kind=KINDS[row["program"]])
        except SystemExit as stop:
            return _refused(stop.code, said.getvalue())
    lines = said.getvalue().splitlines()
    assert all(line.startswith("megacore: note: ") for line in lines), lines
    return Answer(config=config, sentences=[line.removeprefix("megacore: note: ") for line in lines])


def _refused(status: Any, message: str) -> Answer:
    """The problems of a refusal, after a look at its form."""
    first, *lines, last = message.rstrip("\n").replace("\n    ", "\0").split("\n")
    problems = [line.removeprefix("  - ").replace("\0", "\n") for line in lines if line.startswith("  - ")]
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    assert (status, first) == (2, f"megacore: refused: {count}"), message
    assert last.startswith("Flags and their defaults: pretrain_"), message
    return Answer(config=None, sentences=problems, explained=[line for line in lines if not line.startswith("  - ")])


def wrong(row: Row) -> Iterator[str]:
    """What is not as a row says."""
    place_files(row)
    found = answer(row, row["words"])
    if is_refused(row) != (found.config is None):
        yield f"is {'refused' if found.config is None else 'accepted'}: {found.sentences}"
        return
    yield from _unsaid(row, found)
    if found.config is None or "equals" not in row:
        return
    if isinstance(row["equals"], dict):
        values = {name: value_of(found.config, name) for name in row["equals"]}
        expected = row["equals"].items()
        yield from (f"has {n} {values[n]!r}, not {v!r}" for n, v in expected if not equal(values[n], v))
    elif (other := answer(row, row["equals"])).config is None:
        yield f"equals a refused line: {other.sentences}"
    else:
        yield from differences(found.config, other.config)


def is_refused(row: Row) -> bool:
    """Whether what a row says is a refusal."""
    return "says" in row and "equals" not in row and row.get("status", 2) == 2


def place_files(row: Row) -> None:
    """Write the files of a row into the working directory."""
    for name, text in {**row.get("files", {}), **({row["file"]: row["text"]} if "text" in row else {})}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            Path(name).mkdir()
        else:
            Path(name).write_text(text, encoding="utf-8")
    if "saved" in row:
        saved = answer(row, row["saved"])
        assert saved.config is not None, saved.sentences
        save_toml(saved.config, Path("config.toml"))


def _unsaid(row: Row, found: Answer) -> Iterator[str]:
    left = [*found.sentences]
    for line in row.get("says", []):
        pattern = re.compile(re.escape(line).replace(r"\.\.\.", ".*"))
        said = next(filter(pattern.fullmatch, [*left, *found.explained]), None)
        if said is None:
            yield f"does not say: {line}"
        elif said in left:
            left.remove(said)
    if "says" in row and not row.get("some", False):
        yield from (f"says as well: {line}" for line in left)


def differences(config: ResolvedConfig, other: ResolvedConfig) -> Iterator[str]:
    """The sections in which two configurations differ."""
    for name in sections_of(type(config)):
        if (one := getattr(config, name)) != (expected := getattr(other, name)):
            yield f"has {one}, not {expected}"


def value_of(config: ResolvedConfig, name: str) -> Any:
    """A field of a section, or what the whole configuration says, also of its parts: `experts.num_experts`."""
    first, _, rest = name.partition(".")
    sections = (getattr(config, section) for section in sections_of(type(config)))
    found = next(getattr(one, first) for one in (config, *sections) if hasattr(one, first))
    return attrgetter(rest)(found) if rest else found


def equal(found: Any, expected: Any) -> bool:
    """Whether a value is that of a row, where fractions may be rounded; TOML has no tuples, and "None" for none."""
    if found is None:
        return bool(expected == "None")
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-12)
    return (list(found) if isinstance(found, tuple) else found) == expected


@pytest.mark.parametrize("subject", TABLES)
def test_command_lines(subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []
    for number, row in enumerate(rows_of(subject)):
        (place := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(place)
        failures += [f"{row['words']} {row.get('text', '')}\n    {line}" for line in wrong(row)]
    assert not failures, "\n".join([f"{len(failures)} of {subject} in tests/argv.toml:", *failures])


def test_every_parameter_has_a_row() -> None:
    words = {word for row in TABLES["parameters"]["rows"] for word in row["words"].replace("=", " ").split()}
    assert {field for field in OWNERS if not {own_flag(field), negative(own_flag(field))} & words} == set()


# By default the proposals of every subject but the largest.
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "wrong_values"))
        for name, table in TABLES.items()
        if "file" not in table
    ],
)
def test_what_a_refusal_proposes_is_accepted(subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every row with one problem; where there are several, a change solves its own."""
    failures, tried = [], 0
    refused = [row for row in rows_of(subject) if is_refused(row)]
    for number, row in enumerate(refused):
        (place := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(place)
        place_files(row)
        for problem in row["says"]:
            for change in proposals(problem):
                tried += 1
                left = refused_after(row, change)
                if problem in left or (left and len(row["says"]) == 1):
                    failures.append(f"{row['words']}: {change} of {problem!r} leaves {left}")
    assert not failures, "\n".join(failures)
    assert tried or len(refused) < 10


def refused_after(row: Row, change: dict[str, Any]) -> list[str]:
    """The problems of a row's command line after a change of values by field."""
    values = dict(change)
    changed = {**row, "plain": "", "ranks": values.pop("world_size", row["ranks"])}
    words = shlex.split(f"{row['plain']} {row['words']}")
    for name, value in values.items():
        # Optimizers have fields of their own for one parameter: that of the command line is meant.
        fields = next((some for of in PARAMETERS.values() for some in of.values() if name in some), [name])
        flags = [f"--{field.replace('_', '-')}" for field in [*fields, name]]
        flag = next((one for one in flags if one in words), flags[-1])
        for first in [i for i, word in enumerate(words) if word.split("=")[0] == flag][::-1]:
            last = next((i for i in range(first + 1, len(words)) if words[i].startswith("--")), len(words))
            del words[first:last]
        if value is not None:
            words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    found = answer(changed, shlex.join(words))
    return found.sentences if found.config is None else []
