"""pretrain_bert.py's configuration: a section more than every run's, filled by style, and refusals of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import flag_names, load_toml, parse_config, save_toml
from megacore.config.flags import all_fields
from megacore.config.presets import BERT_PRESETS
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse

alone, refuse = refusals.alone, refusals.refuse  # fixtures
BERT_FLAGS = """--bert-style --sentence-task --num-token-types --mask-prob --short-seq-prob --whole-word-masking
    --max-ngram --global-attention-interval --local-rotary-base"""


def parse_bert(*argv: str) -> ResolvedBertConfig:
    """The configuration that pretrain_bert.py takes from a command line."""
    return parse_config([*GOOD, *argv], prog="pretrain_bert.py", description="Pretrain a BERT.", kind=BertConfig)


def test_the_flags_are_those_of_every_run_and_berts() -> None:
    assert flag_names(BertConfig).keys() == flag_names().keys() | set(BERT_FLAGS.split())


def test_a_saved_configuration_reads_back_equal_and_only_as_its_own_kind(tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "config.toml"
    first = parse_bert("--bert-style", "modern", "--max-ngram", "2")
    save_toml(first, path)
    assert "[bert]" in path.read_text()
    assert load_toml(path, BertConfig).resolve(1) == first
    again = parse_config(["--config", str(path)], prog="x", description="x", kind=BertConfig)
    assert again == first
    assert "[bert] is not a table" in refuse("--config", str(path))
    assert type(first) is type(first.resolve(1)) is ResolvedBertConfig


def test_a_gpt_configuration_gives_bert_its_shape(tmp_path: Path) -> None:
    gpt = refusals.parse(*GOOD, "--num-layers", "3")
    save_toml(gpt, tmp_path / "config.toml")
    bert = parse_config(["--config", str(tmp_path / "config.toml")], prog="x", description="x", kind=BertConfig)
    assert (bert.model, bert.bert.sentence_task) == (gpt.model, "nsp")


@pytest.mark.parametrize("preset", BERT_PRESETS)
def test_presets_read_back_equal(preset: str, tmp_path: Path) -> None:
    first = parse_bert("--preset", preset)
    save_toml(first, tmp_path / "config.toml")
    assert load_toml(tmp_path / "config.toml", BertConfig).resolve(1) == first
    assert BERT_PRESETS[preset].keys() <= all_fields(BertConfig).keys()
