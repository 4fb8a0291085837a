"""pretrain_bert.py's configuration: a section more than every run's, filled by style, and refusals of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacore.config import Config, DataConfig, ModelConfig, TrainingConfig, validate
from megacore.config.bert import BertConfig, BertSection, ResolvedBertConfig
from megacore.config.cli import flag_names, load_toml, parse_config, save_toml
from megacore.config.fields import field_infos
from megacore.config.flags import all_fields
from megacore.config.presets import BERT_PRESETS
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse

alone, refuse = refusals.alone, refusals.refuse  # fixtures
BERT_FLAGS = (
    "--bert-style",
    "--sentence-task",
    "--num-token-types",
    "--mask-prob",
    "--short-seq-prob",
    "--whole-word-masking",
    "--max-ngram",
    "--global-attention-interval",
    "--local-rotary-base",
)


def parse_bert(*argv: str) -> ResolvedBertConfig:
    """The configuration that pretrain_bert.py takes from a command line."""
    return parse_config([*GOOD, *argv], prog="pretrain_bert.py", description="Pretrain a BERT.", kind=BertConfig)


def found(*, data: dict[str, Any] | None = None, **bert: Any) -> list[str]:
    """What is wrong with a configuration."""
    layers = {name: value for name, value in BertConfig.defaults(bert).items() if name in field_infos(ModelConfig)}
    config = BertConfig(
        model=ModelConfig(**layers),
        data=DataConfig(**{"mock_data": True, **(data or {})}),
        training=TrainingConfig(train_iters=2),
        bert=BertSection(**bert),
    )
    return [problem for problem in validate(config, 1) if "needs a vocabulary" not in problem]


def test_the_flags_are_those_of_every_run_and_berts() -> None:
    assert flag_names(BertConfig).keys() == flag_names().keys() | set(BERT_FLAGS)
    bert = parse_bert("--mask-prob", "0.2", "--no-whole-word-masking", "--max-ngram", "3", "--lr", "1e-4")
    assert (bert.bert.mask_prob, bert.bert.whole_word_masking, bert.bert.max_ngram) == (0.2, False, 3)
    assert bert.optimizer.lr == 1e-4


@pytest.mark.parametrize(("style", "task", "prob"), [("classic", "nsp", 0.15), ("modern", "none", 0.30)])
def test_the_style_decides_what_is_not_given(style: str, task: str, prob: float) -> None:
    section = parse_bert("--bert-style", style).bert
    assert (section.sentence_task, section.mask_prob) == (task, prob)
    assert parse_bert("--bert-style", style, "--mask-prob", "0.5").bert.mask_prob == 0.5
    assert parse_bert("--sentence-task", "sop").bert.sentence_task == "sop"
    assert parse_bert("--bert-style", style, "--sentence-task", "auto").bert.sentence_task == task


def test_none_is_no_sentence_task_and_no_other_spelling_of_it_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_bert("--sentence-task", "none").bert.sentence_task == "none"
    with pytest.raises(SystemExit, match="2"):
        parse_bert("--sentence-task", "None")
    assert "--sentence-task None is not known" in capsys.readouterr().err


def test_a_gpt_run_knows_none_of_them(refuse: Refuse) -> None:
    message = refuse(*GOOD, "--mask-prob", "0.2", "--sentence-task", "nsp")
    assert "--mask-prob is not a flag" in message
    assert "--sentence-task is not a flag" in message


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
    gpt: Config = refusals.parse(*GOOD, "--num-layers", "3")
    save_toml(gpt, tmp_path / "config.toml")
    bert = parse_config(["--config", str(tmp_path / "config.toml")], prog="x", description="x", kind=BertConfig)
    assert (bert.model, bert.bert.sentence_task) == (gpt.model, "nsp")


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"data": {"eod_mask_loss": True, "tokenizer": "t"}},
        "--eod-mask-loss is for a model that predicts the next token",
    ),
    (
        {"bert_style": "modern", "sentence_task": "nsp"},
        "--sentence-task nsp needs pairs of segments, which --bert-style",
    ),
    ({"bert_style": "modern", "short_seq_prob": 0.5}, "--short-seq-prob 0.5 has no effect with --bert-style modern"),
    (
        {"data": {"seq_length": 4}},
        "--seq-length 4 leaves no room for text in [CLS] A [SEP] B [SEP] (--sentence-task nsp)",
    ),
    ({"data": {"seq_length": 2}, "sentence_task": "none"}, "--seq-length 2 leaves no room for text in [CLS] A [SEP] ("),
    ({"local_rotary_base": 5e3}, "--local-rotary-base 5000 has no effect with --bert-style classic"),
    ({"global_attention_interval": 2}, "--global-attention-interval 2 has no effect with --bert-style classic"),
    ({"mask_prob": 0.0}, "--mask-prob 0 must be above 0 and below 1"),
    ({"mask_prob": 1.0}, "--mask-prob 1 must be above 0 and below 1"),
    ({"max_ngram": 0}, "--max-ngram 0 must be at least 1"),
    ({"sentence_task": "nps"}, "--sentence-task nps is not known: use auto, nsp, sop or none (did you mean nsp?)"),
    ({"sentence_task": "None"}, "--sentence-task None is not known: use auto, nsp, sop or none (did you mean none?)"),
    ({"bert_style": "classical"}, "--bert-style classical is not known: use classic or modern (did you mean classic?)"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_what_cannot_be_is_refused_by_name_with_the_way_out(values: dict[str, Any], message: str) -> None:
    (problem,) = found(**values)
    assert problem.startswith(message), problem
    assert ": " in problem


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--preset", "gpt2-small"],
            "--preset gpt2-small is GPT's: use bert-tiny, bert-base, bert-large, modernbert",
        ),
        (
            ["--position-embedding-type", "rope"],
            "--position-embedding-type rope is not available with --bert-style classic",
        ),
        (
            ["--window-size", "8"],
            "--window-size 8 has no effect with --bert-style classic: leave it out, or use --bert",
        ),
        (["--embedding-layernorm"], "--embedding-layernorm is for BLOOM, and BERT always has a norm after"),
        (["--bert-style", "modern", "--parallel-residual"], "--parallel-residual is for the blocks of GPT-NeoX"),
        (["--eod-mask-loss"], "--eod-mask-loss is for a model that predicts the next token"),
        (["--init-from-hf", "nowhere"], "--init-from-hf nowhere is for pretrain_gpt.py: convert the directory"),
        (["--init-from-hf", "nowhere", "--preset", "bert-tiny"], "--init-from-hf nowhere is for pretrain_gpt.py"),
        (
            ["--preset", "gpt2-tinny"],
            "--preset gpt2-tinny is not known: use bert-tiny, bert-base, bert-large, modernbert",
        ),
        (["--preset", "mistral-7b"], "--preset mistral-7b is GPT's"),
        (
            ["--bert-style", "modern", "--position-embedding-type", "learned"],
            "--position-embedding-type learned is not",
        ),
    ],
)
def test_layers_that_a_style_does_not_have_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_bert(*flags)
    said = capsys.readouterr().err
    assert message in said
    assert "refused: 1 problem\n" in said, said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-path", "p"], "--data-path needs the tokenizer that made it"),
        (["--mock-data", "--preset", "gpt2-tiny"], "--preset gpt2-tiny is GPT's"),
        (["--mock-data", "--preset", "bert-tiny", "--eod-mask-loss"], "--eod-mask-loss is for a model that predicts"),
    ],
)
def test_one_slip_is_one_problem(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for ending in (".bin", ".idx"):
        Path(f"p{ending}").touch()
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--train-iters", "1", *flags], prog="x", description="x", kind=BertConfig)
    said = capsys.readouterr().err
    assert message in said
    assert "refused: 1 problem\n" in said, said


def test_a_preset_of_berts_is_refused_for_a_gpt(refuse: Refuse) -> None:
    assert "--preset bert-base is BERT's" in refuse(*GOOD, "--preset", "bert-base")


def test_the_style_decides_what_layers_are_made_of_unless_a_flag_does() -> None:
    classic, modern = parse_bert().model, parse_bert("--preset", "modernbert-base").model
    assert (classic.activation, classic.position_embedding_type, classic.norm_bias) == ("gelu-exact", "learned", True)
    assert (modern.activation, modern.position_embedding_type, modern.norm_bias) == ("geglu-exact", "rope", False)
    assert (modern.window_size, modern.ffn_hidden_size, modern.hidden_dropout) == (128, 1152, 0.0)
    assert parse_bert("--bert-style", "modern", "--window-size", "64").model.window_size == 64
    assert parse_bert("--activation", "gelu").model.activation == "gelu"


def test_what_a_style_says_is_never_taken_for_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modern = parse_bert("--bert-style", "modern", "--normalization", "RMSNorm")
    assert (modern.model.normalization, modern.model.disable_bias_linear) == ("RMSNorm", True)
    save_toml(modern, tmp_path / "config.toml")
    again = parse_config(["--config", str(tmp_path / "config.toml")], prog="x", description="x", kind=BertConfig)
    assert again == load_toml(tmp_path / "config.toml", BertConfig).resolve(1) == modern
    for flags, named in (
        (("--position-embedding-type", "learned"), "--position-embedding-type learned is not available with"),
        (("--normalization", "RMSNorm", "--no-norm-bias"), "--no-norm-bias has no effect with --normalization RMSNorm"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_bert("--bert-style", "modern", *flags)
        said = capsys.readouterr().err
        assert "1 problem\n" in said, said
        assert named in said


@pytest.mark.parametrize("preset", BERT_PRESETS)
def test_presets_read_back_equal(preset: str, tmp_path: Path) -> None:
    first = parse_bert("--preset", preset)
    save_toml(first, tmp_path / "config.toml")
    assert load_toml(tmp_path / "config.toml", BertConfig).resolve(1) == first
    assert BERT_PRESETS[preset].keys() <= all_fields(BertConfig).keys()


def test_what_can_be_is_not_refused() -> None:
    assert found() == []
    assert found(data={"seq_length": 5}) == []
    assert found(data={"seq_length": 3}, sentence_task="none") == []
    assert found(bert_style="modern", sentence_task="none", data={"seq_length": 3}) == []
