"""What --help says is true of the entry point that says it, fits the terminal, and can be navigated by topic."""

from __future__ import annotations

import re
from unittest import mock

import pytest

import megacore
from megacore.config import SECTIONS, Config, sections_of
from megacore.config.bert import BertConfig
from megacore.config.cli import flag_names, parse_config
from megacore.config.help import help_text
from megacore.config.messages import number
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.schema import section_of
from megacore.config.spelling import OWNERS, flag, own_flag
from megacore.errors import UserError
from tests.unit import refusals
from tests.unit.refusals import GOOD, parse

alone = refusals.alone  # fixture
KINDS = pytest.mark.parametrize("kind", [Config, BertConfig])
USUAL = """
--preset --num-layers --hidden-size --data-path --tokenizer --mock-data --seq-length --train-iters --micro-batch-size
--global-batch-size --lr --precision --tp --pp --dp --zero-stage --output-dir --save-interval --load --config
"""


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
    assert refused < flag_names(kind).keys()
    flags = {name: others for name, others in flag_names(kind).items() if " " not in name}
    assert len(shown) <= 180
    for name, others in flags.items():
        assert (name in shown) == (name not in refused), name
        assert all(other in shown[name] for other in others if name in shown)


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
def test_the_short_page_has_the_usual_flags_and_says_how_to_see_the_rest(kind: type[Config]) -> None:
    page = help_of("", kind, columns=80)
    assert set(USUAL.split()) <= entries(page).keys()
    assert len(page.splitlines()) < 100
    sections = sections_of(kind).keys() - ({"experts"} if kind is BertConfig else set())  # of which it accepts no flag
    for words in ("--help SECTION", "--help FLAG", "--help all", "--version", *sections):
        assert words in page, words
    assert ("experts" in page) == (kind is Config)
    assert "--train-iters INT" in page
    assert "Required." in entries(page)["--train-iters"]
    assert page.startswith("Usage: python x.py FLAGS\n")


@KINDS
@pytest.mark.parametrize("columns", [60, 80, 120, 300])
def test_no_page_is_wider_than_the_terminal_or_coloured_in_a_pipe(kind: type[Config], columns: int) -> None:
    for topic in ("all", "lr") if columns == 60 else ("", "all", "lr"):
        page = help_of(topic, kind, columns)
        assert max(map(len, page.splitlines())) < min(columns, 120)
        assert "\x1b" not in page


def test_a_flag_is_found_by_every_name_and_a_section_by_its_own() -> None:
    by_name = help_of("norm_epsilon", Config)
    assert by_name == help_of("--norm-epsilon", Config) == help_of("layernorm-epsilon", Config)
    assert help_of("no-mock-data", Config) == help_of("mock-data", Config)
    assert help_of("optimizer", Config).startswith("[optimizer]\n")  # the section
    assert help_of("--optimizer", Config).startswith(
        f"  --optimizer {{{','.join(OPTIMIZERS)}}} [NAME=VALUE...]\n"
    )  # the flag
    assert help_of("config", Config).startswith("  --config FILE.toml\n")


@pytest.mark.parametrize(
    ("topic", "kind", "message"),
    [
        ("paralel", Config, f"use {', '.join(SECTIONS)} or all, or the name of a flag"),
        ("paralel", Config, "(did you mean parallel?)"),
        ("learning-rate-warmup", Config, "--help learning-rate-warmup: there is no such section or flag"),
        ("bert", Config, "there is no such section or flag"),
        ("swiglu", Config, "--swiglu is a Megatron-LM flag, and becomes --activation swiglu"),
        ("use-flash-attn", Config, "--use-flash-attn is a Megatron-LM flag, and becomes --attention sdpa"),
        ("parallel-residual", BertConfig, "--parallel-residual is for the blocks of GPT-NeoX, not of BERT"),
    ],
)
def test_an_unknown_topic_is_refused_with_the_choices(topic: str, kind: type[Config], message: str) -> None:
    with pytest.raises(UserError) as error:
        help_text(topic, kind, prog="x", description="y")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        (["--help"], 0, "Usage: python pretrain_gpt.py", ""),
        (["--help", "lr"], 0, "  --lr FLOAT\n", ""),
        (["--help", "nonsense"], 2, "", "megacore: --help nonsense: there is no such section or flag: use model,"),
        (["--version"], 0, f"megacore {megacore.__version__}\n", ""),
        (["--tp", "x", "--version"], 0, f"megacore {megacore.__version__}\n", ""),
    ],
)
def test_the_command_line_answers_and_exits(
    argv: list[str], status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only the first rank of a run says anything."""
    with pytest.raises(SystemExit, match=str(status)):
        parse(*argv)
    printed = capsys.readouterr()
    assert printed.out.startswith(out) and bool(printed.out) == bool(out)
    assert printed.err.startswith(err) and bool(printed.err) == bool(err)
    second = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with mock.patch.dict("os.environ", second), pytest.raises(SystemExit, match=str(status)):
        parse(*argv)
    assert capsys.readouterr() == ("", "")
