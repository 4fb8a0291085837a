"""Every row of tools.toml: what a tool, a benchmark or an example says of a command line.

A table of tools.toml has the modules of `programs`, whose `main` is called with `plain` and the words of a row. Besides

    files      name -> text of files in the working directory; a name that ends in / is a directory
    file, text one of them, of which the table names the file and each row has its text
    slow       whether the row runs with the slow tests
    variables  further ones of the environment
    says       the problems of a refusal, all of them and whole; ... stands for any words
    prints     parts of what a command that works prints
    status     its exit status, if not 0
    lacks      what it does not print
    notes      its notes, all of them and whole
    equals     a command line that prints the same
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.examples import conftest
from tests.test_argv import place_files

examples_on_the_path = conftest.unchanged_registries  # fixture
TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("tools.toml").read_text(encoding="utf-8"))


def pattern(lines: list[str]) -> str:
    """An expression for lines in which ... stands for any words."""
    return "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in lines)


def run(program: str, words: list[str]) -> tuple[Any, str, str]:
    """The status of a program, what it prints, and its errors."""
    module: Any = importlib.import_module(program)
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", [module.__file__]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = module.main(words)
        except SystemExit as stop:
            status = stop.code
    return status, output.getvalue(), errors.getvalue()


def unsaid(row: dict[str, Any], program: str, words: list[str]) -> Iterator[str]:
    """What a command line that works does not say as its row has it."""
    status, output, errors = run(program, words)
    if status != row.get("status", 0):
        yield f"has the status {status}: {errors}"
    yield from (f"does not print {part}" for part in row.get("prints", []) if not re.search(pattern([part]), output))
    yield from (f"prints {part}" for part in row.get("lacks", []) if re.search(pattern([part]), output))
    if "equals" in row and run(program, shlex.split(row["equals"]))[1] != output:
        yield "prints something else than its equal"
    notes = [line.removeprefix("megacore: note: ") for line in errors.splitlines()]
    if notes != row.get("notes", notes):
        yield f"notes {notes}"


def refusal(program: str, words: list[str]) -> list[str]:
    """The problems that a program names, after a look at the form of what it prints."""
    status, output, errors = run(program, words)
    assert (status, output) == (2, "")
    name, (first, *lines) = f"{program.rpartition('.')[2]}.py", errors.splitlines()
    if not lines:
        assert first.startswith(f"{name}: error: ")
        return [first.removeprefix(f"{name}: error: ")]
    *problems, last = [line for line in lines if not line.startswith("Keys of ")]
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    assert (first, last) == (f"megacore: refused: {count}", f"Flags and their defaults: {name} --help")
    return [problem.removeprefix("  - ") for problem in problems]


@pytest.mark.parametrize(
    ("subject", "program", "is_slow"),
    [
        pytest.param(subject, name, is_slow, id=f"{subject}-{name}", marks=[pytest.mark.slow] * is_slow)
        for subject, table in TABLES.items()
        for name in table["programs"]
        for is_slow in sorted({row.get("slow", False) for row in table["rows"]})
    ],
)
def test_command_lines_of_tools(
    subject: str, program: str, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal writes nothing."""
    failures = []
    for number, values in enumerate(TABLES[subject]["rows"]):
        row = {"plain": "", "words": "", "slow": False, **TABLES[subject], **values}
        if row["slow"] != is_slow:
            continue
        (place := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(place)
        place_files(row)
        words, before = shlex.split(f"{row['plain']} {row['words']}"), sorted(place.iterdir())
        with mock.patch.dict("os.environ", row.get("variables", {})):
            if "says" not in row:
                failures += [f"{row['words']} {line}" for line in unsaid(row, program, words)]
                continue
            found = refusal(program, words)
        if not re.fullmatch(pattern(row["says"]), "\n".join(found)):
            failures.append(f"{values} has {found}")
        assert sorted(place.iterdir()) == before
    assert not failures, "\n".join(failures)
