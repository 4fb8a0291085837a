"""What the tests of the command line share: to parse in this process, and to look at what a refusal prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig, cli
from megacore.config.cli import parse_config
from megacore.config.spelling import PARAMETERS, own_flag

GOOD = ["--mock-data", "--vocab-size", "64", "--train-iters", "10"]
Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, and no waiting for a launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "GRACE_SECONDS", 0.0)


def parse(*argv: str, **hooks: Any) -> ResolvedConfig:
    """The configuration that a command line gives."""
    return parse_config(argv, prog="pretrain_gpt.py", description="Pretrain a GPT.", kind=Config, **hooks)


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Parses what must be refused, and returns what is printed."""

    def run(*argv: str, **hooks: Any) -> str:
        with pytest.raises(SystemExit) as exit_info:
            parse(*argv, **hooks)
        assert exit_info.value.code == 2
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return run


def problems(message: str) -> list[str]:
    """The lines of a refusal, after a look at its form."""
    first, *lines, last = message.rstrip("\n").split("\n")
    lines = [line for line in lines if not line.startswith(("Keys of ", "Translated: "))]
    assert first == f"megacore: refused: {len(lines)} problem{'s' if len(lines) != 1 else ''}"
    assert last == "Flags and their defaults: pretrain_gpt.py --help"
    assert all(line.startswith("  - ") for line in lines)
    return [line.removeprefix("  - ") for line in lines]


# ---- what a problem proposes -----------------------------------------------------------------------------------------

_OR = re.compile(r", or (?:use )?(?=--|start |leave |add |choose |\d)")
_NUMBER = r"-?\d[\d.]*(?:e[+-]?\d+)?"
_WAY = re.compile(
    rf"(?:use, for example, )?(?:(--[a-z0-9-]+) )?({_NUMBER}(?:(?:, | or ){_NUMBER})*)"
    rf"( or more| or less| to {_NUMBER}| \(the default\))?"
)
_NO_VALUE = r"(?!(?:DIR|FLOAT|INT|N|PATH|PREFIX|TEXT|too)\b)"
_COMBINED = re.compile(
    rf"((?:--[a-z0-9-]+ (?:\d+ \d+ \d+|{_NO_VALUE}[\w.:-]+)(?: with | and |$))*)"
    r"(?:leave ((?:--[a-z0-9-]+(?: and )?)+) out)?"
)
_START = re.compile(r"(?:, and )?start (\d+)(?: or (\d+))? process.*")


_PARAMETER = re.compile(r"--([a-z0-9-]+) ([a-z0-9-]+)(=|(?=[ ,.:)]|$))")


def _own_flag(found: re.Match[str]) -> str:
    """`--rope-scaling factor=4` as `--rope-scaling-factor 4`; other flags as they are."""
    owner, name, equals = found.groups()
    fields = PARAMETERS.get(field_of(owner), {}).get(name)
    return own_flag(fields[0]) + (" " if equals else "") if fields else found[0]


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _value(text: str) -> Any:
    words = tuple(text.split())
    if re.fullmatch(_NUMBER, text):
        return int(text) if text.isdecimal() else float(text)
    return text if len(words) == 1 else words


def proposals(problem: str) -> Iterator[dict[str, Any]]:
    """Every change of values that a message proposes in numbers; `world_size` stands for the processes."""
    said, _, ways = _PARAMETER.sub(_own_flag, problem).partition(": ")
    for way in _OR.split(ways.removeprefix("use ")):
        way, start = _START.sub("", way), _START.search(way)
        processes: list[dict[str, Any]] = [{"world_size": int(n)} for n in start.groups() if n] if start else [{}]
        if (found := _WAY.fullmatch(way)) is not None:
            flag, values, bound = found.groups()
            numbers = [_value(value) for value in re.findall(_NUMBER, values)]
            if bound in (" or more", " or less") and " and below " not in said:
                further = numbers[0] + (1 if bound == " or more" else -1)
                numbers += [further] if further > 0 else []
            needed = re.search(r" needs (--[a-z0-9-]+)$", said)
            name = field_of(flag or (needed[1] if needed else re.findall(r"--[a-z0-9-]+", said)[0]))
            changed: list[dict[str, Any]] = [{name: number} for number in numbers]
        elif (found := _COMBINED.fullmatch(way)) is not None:
            given, left_out = (text or "" for text in found.groups())
            pairs = re.findall(r"(--[a-z0-9-]+) (\d+ \d+ \d+|[\w.:-]+)", given)
            values_of = {field_of(flag): _value(text) for flag, text in pairs}
            changed = [{**values_of, **dict.fromkeys(map(field_of, re.findall(r"--[a-z0-9-]+", left_out)))}]
        elif way == "leave the flag out":
            changed = [{field_of(re.findall(r"--[a-z0-9-]+", said)[0]): None}]
        else:
            continue
        yield from ({**one, **other} for one in changed for other in processes if one or other)
