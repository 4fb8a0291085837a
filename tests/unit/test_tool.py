"""What the command-line tools share: how they end."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience
from tests.unit.packaging_builds import ROOT

TOOL = """
import sys
from megacore.commands.tool import ToolParser, run_tool
from megacore.errors import UserError

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


def test_a_node_of_several_ranks_is_refused_once() -> None:
    """All ranks of a node are refused alike; the first says it, and no other ends before it has."""
    refusal = 'raise UserError("cannot be done")'
    refused = TOOL.format(lines=1).replace('print("a line of the output")', refusal)
    ranks = [started(refused, env={**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(2)]
    first = ranks[0].communicate(timeout=patience(60))[1]
    ranks[1].kill()  # as a launcher does
    assert (ranks[0].returncode, first) == (2, "tool: error: cannot be done\n")
    assert ranks[1].communicate()[1] == ""


OF_A_RUN: dict[str, tuple[str | None, str]] = {
    "generate": ("--checkpoint", "--prompt once"),
    "fill_mask": ("--checkpoint", "[MASK]"),
    "perplexity": ("--checkpoint", "--data-path corpus"),
    "convert_checkpoint": ("--input", "--from megacore --to hf --output new"),
    **dict.fromkeys(("audit", "inspect_checkpoint", "draw_schedule", "report", "where"), (None, "")),
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
