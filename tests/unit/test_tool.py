"""What the command-line tools share: how they end."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.commands.tool import ToolParser, run_tool, whole
from megacore.config.fields import LARGEST_INT
from megacore.errors import ConfigError
from tests.patience import patience
from tests.unit.packaging_builds import ROOT

TOOL = """
import sys
from megacore.commands.tool import ToolParser, run_tool

def action(args):
    for _ in range({lines}):
        print("a line of the output")

sys.exit(run_tool(ToolParser(prog="tool"), [], action))
"""


def started(code: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT, **options)


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_tool_whose_output_nobody_reads_ends_quietly(lines: int) -> None:
    """Few lines are written when the interpreter ends, many while the tool runs."""
    reader, writer = os.pipe()
    os.close(reader)
    tool = started(TOOL.format(lines=lines), stdout=writer)
    os.close(writer)
    assert (tool.communicate(timeout=patience(60))[1], tool.returncode) == ("", 141)


def test_a_name_that_is_not_utf8_is_printed_where_the_terminal_takes_only_utf8() -> None:
    code = TOOL.format(lines=1).replace('"a line of the output"', r'"/data/\udcff"')
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    tool = started(code, stdout=subprocess.PIPE, env=strict)
    assert tool.communicate(timeout=patience(60)) == ("/data/\\udcff\n", "")
    assert tool.returncode == 0


def test_a_node_of_several_ranks_is_refused_once() -> None:
    """All ranks of a node are refused alike; the first says it, and no other ends before it has."""
    refused = "from megacore.errors import UserError\n" + TOOL.format(lines=1).replace(
        'print("a line of the output")', 'raise UserError("cannot be done")'
    )
    ranks = [started(refused, env={**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(2)]
    first = ranks[0].communicate(timeout=patience(60))[1]
    ranks[1].kill()  # as a launcher does
    assert (ranks[0].returncode, first) == (2, "tool: error: cannot be done\n")
    assert ranks[1].communicate()[1] == ""


def test_problems_of_a_configuration_are_the_trainers_list(capsys: pytest.CaptureFixture[str]) -> None:
    def action(args: object) -> None:
        raise ConfigError(["--a 1 is wrong", "--b 2 is wrong"])

    assert run_tool(ToolParser(prog="tool"), [], action) == 2
    assert capsys.readouterr().err == (
        "megacore: refused: 2 problems\n  - --a 1 is wrong\n  - --b 2 is wrong\nFlags and their defaults: tool --help\n"
    )


@pytest.mark.parametrize(
    ("text", "most", "said"),
    [
        ("1.5", LARGEST_INT, "'1.5' is not a whole number: use 1 or 2"),
        ("2.0", LARGEST_INT, "'2.0' is not a whole number: use 2"),
        ("two", LARGEST_INT, "'two' is not a whole number: use 1 or more"),
        ("two", 8, "'two' is not a whole number: use 1 to 8"),
        ("8.5", 8, "'8.5' is not a whole number: use 8"),
        ("0.5", 8, "'0.5' is not a whole number: use 1"),
        ("inf", LARGEST_INT, "'inf' is not a whole number: use 1 or more"),
        ("nan", LARGEST_INT, "'nan' is not a whole number: use 1 or more"),
        ("0", LARGEST_INT, "0 must be at least 1: use 1 or more"),
        ("2147483648", LARGEST_INT, "2147483648 must be at most 2147483647: use 2147483647 or less"),
        ("9", 8, "9 must be at most 8: use 8 or less"),
    ],
)
def test_a_wrong_whole_number_is_refused_with_values_that_work(text: str, most: int, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        whole(1, most)(text)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--size 1 --size=2", "--size is given twice, as --size 1 and as --size 2: keep one of them"),
        ("--of a b --of a", "--of is given twice, as --of a b and as --of a: give all of its values after one flag"),
        ("-s 1 --size 2", "-s is given twice, as -s 1 and as --size 2: keep one of them"),
        ("--size 1 --size 1 --on --on", ""),
        ("--of a -s 1 --of a -- --size", ""),
    ],
)
def test_a_flag_with_two_values_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a flag of a run is; the same value twice is no contradiction."""
    parser = ToolParser(prog="tool")
    parser.add_argument("-s", "--size")
    parser.add_argument("--of", nargs="+")
    parser.add_argument("--on", action="store_true")
    parser.add_argument("names", nargs="*")
    assert run_tool(parser, words.split(), lambda _: None) == (2 if said else 0)
    assert said in capsys.readouterr().err


OF_A_RUN = {
    "generate": ("--checkpoint", "--prompt once"),
    "fill_mask": ("--checkpoint", "[MASK]"),
    "perplexity": ("--checkpoint", "--data-path corpus"),
    "convert_checkpoint": ("--input", "--from megacore --to hf --output new"),
    "inspect_checkpoint": (None, ""),
    "draw_schedule": (None, ""),
    "report": (None, ""),
    "where": (None, ""),
}


@pytest.mark.parametrize("name", OF_A_RUN)
def test_every_tool_takes_its_run_alone_or_by_the_older_flag(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tool, (flag, others) = importlib.import_module(f"tools.{name}"), OF_A_RUN[name]
    forms = [["absent", *others.split()], *([[*others.split(), flag, "absent"]] if flag else [])]
    for words in forms:
        assert tool.main(words) == 2
        assert "absent" in capsys.readouterr().err
    if flag is not None:
        assert tool.main([*others.split(), f"{flag}="]) == 2
        assert f"{flag} is empty: give it a value" in capsys.readouterr().err
    tool.main(["--help"])
    said = capsys.readouterr().out
    assert re.search(r"^  RUN ", said, re.MULTILINE) and f" {flag} " not in said
