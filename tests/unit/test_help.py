"""What --help says is true of the entry point that says it: its flags, its presets, and its defaults in every style."""

from __future__ import annotations

import re

import pytest

from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.config.cli import flag_names, parse_config
from megacore.config.help import print_help
from megacore.config.messages import number
from megacore.config.presets import BERT_PRESETS, GPT_PRESETS
from tests.unit import refusals
from tests.unit.refusals import GOOD

alone = refusals.alone  # fixture
KINDS = pytest.mark.parametrize("kind", [Config, BertConfig])


def help_of(kind: type[Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The text of each flag, in one line."""
    monkeypatch.setenv("COLUMNS", "120")
    print_help("x", "y", kind)
    lines = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if re.fullmatch(r"--[a-z0-9-]+( [^ ]+)?(, --[a-z0-9-]+( [^ ]+)?)*", line):
            name = re.split("[ ,]", line)[0]
        found[name] = f"{found.get(name, '')} {line}".strip()
    return found


@KINDS
def test_it_has_every_flag_that_can_be_given_and_no_other(
    kind: type[Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(kind, capsys, monkeypatch)
    refused = {"--" + name.replace("_", "-") for name in kind.foreign}
    assert refused < flag_names(kind).keys()
    for name, others in flag_names(kind).items():
        assert (name in shown) == (name not in refused), name
        assert all(other in shown[name] for other in others if name in shown)


@KINDS
def test_it_names_the_presets_of_its_own(
    kind: type[Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(help_of(kind, capsys, monkeypatch).values())
    for name in (*GPT_PRESETS, *BERT_PRESETS):
        assert (re.search(rf"\b{re.escape(name)}\b", text) is not None) == (name in kind.presets), name


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_berts_defaults_are_those_that_a_run_has(
    style: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(BertConfig, capsys, monkeypatch)
    argv = [*GOOD, "--bert-style", style]
    model = parse_config(argv, prog="x", description="x", kind=BertConfig).model
    names = "norm_epsilon norm_bias activation disable_bias_linear position_embedding_type rotary_base window_size"
    for name in (*names.split(), "hidden_dropout", "attention_dropout", "normalization"):
        value = getattr(model, name)
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        text = number(value) if isinstance(value, float) else text
        hint = shown["--" + name.replace("_", "-")].rpartition("(default: ")[2].rstrip(")")
        first, *others = hint.split("; ")
        own = [other for other in others if other.endswith(f" with --bert-style {style}")]
        assert (own[0].split()[0] if own else first) == text, (name, hint)


def test_a_window_is_told_as_each_model_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "last so many positions" in help_of(Config, capsys, monkeypatch)["--window-size"]
    assert "half as many away, on either side" in help_of(BertConfig, capsys, monkeypatch)["--window-size"]
