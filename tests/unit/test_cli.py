"""The command line as a user meets it: what is taken, and what each refusal says, on which rank, and once."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.flags import all_fields, flags_by_name, read_flags
from megacore.config.help import help_text
from megacore.config.messages import number
from megacore.config.schema import section_of
from megacore.config.spelling import OWNERS, flag, negative, own_flag
from megacore.errors import ConfigError, DataError
from tests.patience import patience
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

ROOT = Path(__file__).parents[2]
alone, refuse = refusals.alone, refusals.refuse  # fixtures


# ---- what is accepted ------------------------------------------------------------------------------------------------


def test_every_alias_equals_its_flag() -> None:
    aliased = [info for info in all_fields().values() if info.aliases and info.owner is None]
    assert len(aliased) >= 6
    for info in aliased:
        value = [] if info.kind is bool else ["1"]
        assert len({repr(read_flags([name, *value]).values) for name in info.flags}) == 1, info.name


# ---- ranks -----------------------------------------------------------------------------------------------------------


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, world_size: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


def test_the_launcher_is_told_the_cause(refuse: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    text = refuse(*GOOD, "--tp", "3")
    cause = json.loads(file.read_text())["message"]
    assert cause["message"] == cause["extraInfo"]["py_callstack"] == text.rstrip("\n")
    assert int(cause["extraInfo"]["timestamp"]) == pytest.approx(time.time(), abs=patience(20))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such"))
    assert problems(refuse(*GOOD, "--tp", "3"))


def test_the_inputs_complete_and_check_the_configuration(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ResolvedConfig] = []

    def unreadable(config: Config) -> int:
        raise DataError("tok.json is not a tokenizer\ngive another")

    def refused(config: Config) -> None:
        raise ConfigError(["first", "second"])

    assert parse(*GOOD, vocabulary=lambda config: 64, checks=[seen.append]) == seen[0] == parse(*GOOD)
    assert "  - tok.json is not a tokenizer\n    give another\n" in refuse(*GOOD, vocabulary=unreadable)
    assert "refused: 3 problems" in refuse(*GOOD, vocabulary=unreadable, checks=[refused])
    assert "refused: 1 problem\n" in refuse(*GOOD, vocabulary=unreadable, checks=[unreadable])
    assert problems(refuse(*GOOD, checks=[refused])) == ["first", "second"]
    as_rank(monkeypatch, 1, 1, 2)
    parse(*GOOD, checks=[refused])  # not this rank's to check
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    assert refuse(*GOOD, vocabulary=unreadable) == ""
    as_rank(monkeypatch, 4, 0, 8)  # the first of another node
    assert refuse(*GOOD, "--tp", "3") == ""
    assert len(slept) == 2  # each waits for the one that speaks
    assert len(seen) == 1


# ---- the process -----------------------------------------------------------------------------------------------------


def test_help_into_a_closed_pipe_ends_quietly() -> None:
    command = f"{shlex.quote(sys.executable)} pretrain_gpt.py --help all | true"
    words = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=patience(60))
    assert (done.returncode, done.stderr) == (0, "")


# ---- --help ----------------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", [Config, BertConfig])


def help_of(topic: str, kind: type[Config], columns: int = 120) -> str:
    """A page of help, as it is printed into a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return help_text(topic, kind, prog="x.py", description="y")


def entries(page: str) -> dict[str, str]:
    """The text of each flag in one line, its names included, without its parameters."""
    texts: dict[str, str] = {}
    name = ""
    for line in page.splitlines():
        if found := re.match(r"  (--[a-z0-9-]+)", line):
            name = found[1]
        if not re.match(r" {8,10}\S", line):
            texts[name] = f"{texts.get(name, '')} {line.strip()}".strip()
    return texts


# ---- every flag ------------------------------------------------------------------------------------------------------


@KINDS
def test_all_has_every_flag_that_can_be_given_and_no_other(kind: type[Config]) -> None:
    shown = entries(help_of("all", kind))
    refused = {flag(name) for name in kind.unsupported}
    flags = {info.flag: info for info in flags_by_name(kind).values()}
    assert refused < flags.keys()
    assert len(shown) <= 180
    for name, info in flags.items():
        others = (*info.aliases, *([negative(name)] if info.kind is bool else []))
        assert info.owner or (name in shown) == (name not in refused), name
        assert info.owner or all(other in shown[name] for other in others if name in shown)


@KINDS
def test_all_has_every_parameter_that_can_be_given_and_no_other(kind: type[Config]) -> None:
    for name, (owner, parameter) in OWNERS.items():
        page = help_of(section_of(kind, name), kind)
        is_accepted = not {name, owner} & kind.unsupported.keys()
        assert bool(re.search(rf"^ +{parameter}[=:]", page, re.MULTILINE)) == is_accepted, name
        if is_accepted:
            assert all(form in help_of(own_flag(name), kind) for form in (flag(name), own_flag(name)))


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_berts_defaults_are_those_that_a_run_has(style: str) -> None:
    shown = entries(help_of("all", BertConfig))
    argv = [*GOOD, "--bert-style", style]
    model = parse_config(argv, prog="x", description="x", kind=BertConfig).model
    names = "norm_epsilon norm_bias activation disable_bias_linear position_embedding_type rotary_base"
    for name in (*names.split(), "hidden_dropout", "attention_dropout", "normalization"):
        value = getattr(model, name)
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        text = number(value) if isinstance(value, float) else text
        hint = shown["--" + name.replace("_", "-")].rpartition("Default: ")[2].removesuffix(".")
        first, *others = hint.split("; ")
        for_style = [other for other in others if other.endswith(f" with --bert-style {style}")]
        assert (for_style[0].split()[0] if for_style else first) == text, (name, hint)


# ---- pages -----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("columns", [60, 80, 120, 300])
def test_no_page_is_wider_than_the_terminal_or_coloured_in_a_pipe(kind: type[Config], columns: int) -> None:
    for topic in ("all", "lr") if columns == 60 else ("", "all", "lr"):
        page = help_of(topic, kind, columns)
        assert max(map(len, page.splitlines())) < min(columns, 120)
        assert "\x1b" not in page


# ---- tools


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
