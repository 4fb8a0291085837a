"""What the command-line tools share: how they end."""

from __future__ import annotations

import os
import subprocess
import sys
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
