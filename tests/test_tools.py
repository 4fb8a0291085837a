"""Every row of tools.toml: what a tool, a benchmark or an example says of a command line that it cannot use.

A table of tools.toml has the modules of `programs`, whose `main` is called with `plain` and the words of a row. Besides

    files      name -> text of files in the working directory; a name that ends in / is a directory
    file, text one of them, of which the table names the file and each row has its text
    slow       whether the row runs with the slow tests
    says       the problems of the refusal, all of them and whole; ... stands for any words
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.examples import conftest
from tests.test_argv import place_files

examples_on_the_path = conftest.unchanged_registries  # fixture
TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("tools.toml").read_text(encoding="utf-8"))


def refusal(program: str, words: list[str]) -> list[str]:
    """The problems that a program names, after a look at the form of what it prints."""
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
    assert (status, output.getvalue()) == (2, "")
    name, (first, *lines) = f"{program.rpartition('.')[2]}.py", errors.getvalue().splitlines()
    if not lines:
        assert first.startswith(f"{name}: error: ")
        return [first.removeprefix(f"{name}: error: ")]
    *problems, last = lines
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
def test_a_command_line_that_cannot_be_used_is_refused(
    subject: str, program: str, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written."""
    failures = []
    for number, values in enumerate(TABLES[subject]["rows"]):
        row = {"plain": "", "words": "", "slow": False, **TABLES[subject], **values}
        if row["slow"] != is_slow:
            continue
        (place := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(place)
        place_files(row)
        before = sorted(place.iterdir())
        found = refusal(program, shlex.split(f"{row['plain']} {row['words']}"))
        expected = "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in row["says"])
        if not re.fullmatch(expected, "\n".join(found)):
            failures.append(f"{values} has {found}")
        assert sorted(place.iterdir()) == before
    assert not failures, "\n".join(failures)
