"""What the tests of the command line share: to parse in this process, and to look at what a refusal prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig, cli
from megacore.config.cli import parse_config

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
