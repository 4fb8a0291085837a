"""The configuration itself: wrong ones are refused by flag and with the way out, right ones resolved and saved."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Annotated, Any

import pytest

from megacore.config import (
    SECTIONS,
    Config,
    ModelConfig,
    ResolvedConfig,
    ResolvedModel,
    TrainingConfig,
    cli,
    sections_of,
    validate,
)
from megacore.config import toml as config_file
from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import load_toml, parse_config, save_toml
from megacore.config.fields import FieldInfo, Range, Section, field_docs, field_infos
from megacore.config.flags import all_fields
from megacore.config.messages import nearest_name
from megacore.config.presets import GPT_PRESETS

GOOD: dict[str, Any] = {"train_iters": 100, "mock_data": True, "vocab_size": 64}


def make(**values: Any) -> Config:
    """A configuration from values by field, over one that is valid."""
    values = {**GOOD, **values}
    sections = {
        name: section(**{key: values[key] for key in field_infos(section) if key in values})
        for name, section in SECTIONS.items()
    }
    return Config(**sections)  # type: ignore[arg-type]


def test_blends_and_splits_are_read() -> None:
    assert make(data_path=("a", "b")).data.blend() == (("a", "b"), None)
    assert make(data_path=("0.25", "a", "3", "b")).data.blend() == (("a", "b"), (0.25, 3.0))
    assert make(data_path=("2024",)).data.blend() == (("2024",), None)
    assert make(split="3, 1").data.split_shares() == (0.75, 0.25, 0.0)
    assert sum(make(split="949,50,1").data.split_shares()) == pytest.approx(1.0, abs=1e-15)


def random_value(info: FieldInfo, rng: random.Random) -> Any:
    """A value that the field alone accepts."""
    if info.optional and rng.random() < 0.3:
        return None
    if info.choices:
        return rng.choice(info.choices)
    if info.kind is bool:
        return rng.random() < 0.5
    if info.kind is int:
        return rng.randint(1, 10 ** rng.randint(1, 9))
    if info.kind is float:
        return rng.choice([rng.random() * 0.999 + 1e-9, 10 ** rng.uniform(-12, -1), 1e-8, 1 / 3])
    texts = [
        rng.choice(['a "b"', "c\\d", "é/ü", "tab\tand\nline", "#", "'", "=[x]", "\u2028", "\x7f"]) for _ in range(3)
    ]
    return tuple(texts[: rng.randint(0, 3)]) if info.kind is tuple else "".join(texts)


def test_saved_configurations_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.toml"
    for seed in range(100):
        rng = random.Random(seed)
        values = {name: random_value(info, rng) for name, info in all_fields().items() if name != "preset"}
        sections: dict[str, Any] = {
            name: section(**{key: values[key] for key in field_infos(section) if key in values})
            for name, section in SECTIONS.items()
        }
        config = Config(**sections)
        save_toml(config, path)
        assert _read_without_checks(path) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def _read_without_checks(path: Path) -> Config:
    given = config_file.read_toml(path)
    assert given.problems == []
    return cli._build(Config, given.values)


@pytest.mark.parametrize("preset", [None, *GPT_PRESETS])
def test_a_resolved_configuration_given_back_is_equal(preset: str | None, tmp_path: Path) -> None:
    rng = random.Random(str(preset))
    for _ in range(10):
        argv = ["--mock-data", "--train-iters", str(rng.randint(2, 9)), "--lr", repr(rng.random())]
        argv += ["--preset", preset] if preset else ["--vocab-size", "17"]
        argv += rng.choice([[], ["--hidden-dropout", "0"], ["--num-layers", "5"], ["--adam-eps", "1e-12"]])
        first = parse_config(argv, prog="x", description="x", kind=Config)
        save_toml(first, tmp_path / "config.toml")
        assert (
            parse_config(["--config", str(tmp_path / "config.toml")], prog="x", description="x", kind=Config) == first
        )
        assert load_toml(tmp_path / "config.toml").resolve(1) == first


def test_the_saved_file_says_which_version_wrote_it_and_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    save_toml(make(), path)
    before = path.read_text()
    assert before.startswith("# megacore 0.")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_toml(make(seed=99), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


# ---- the fields themselves -------------------------------------------------------------------------------------------


def test_every_field_is_documented_and_named_once() -> None:
    names = [name for section in SECTIONS.values() for name in field_infos(section)]
    assert len(names) == len(set(names))
    flags = [flag for info in all_fields().values() for flag in info.flags]
    assert len(flags) == len(set(flags))
    for section in SECTIONS.values():
        docs = field_docs(section)
        assert docs.keys() == field_infos(section).keys()
        assert all(doc.endswith(".") and len(doc) > 20 for doc in docs.values())


def test_every_number_has_a_range_that_holds_its_default() -> None:
    for info in all_fields().values():
        if info.kind in (int, float):
            assert info.range is not None, info.name
            if isinstance(info.default, int | float):
                assert info.default in info.range, info.name


@pytest.mark.parametrize("preset", GPT_PRESETS)
def test_presets_are_valid_whole_shapes(preset: str) -> None:
    assert GPT_PRESETS[preset].keys() <= all_fields().keys()
    assert validate(make(**{"preset": preset, **GPT_PRESETS[preset]}), 1) == []


def test_the_small_preset_is_the_124m_model() -> None:
    model = make(**GPT_PRESETS["gpt2-small"]).resolve(1).model
    hidden, layers = model.hidden_size, model.num_layers
    assert model.vocab_size is not None
    assert model.max_position_embeddings is not None
    block = 12 * hidden**2 + 13 * hidden  # weights; biases and two norms
    assert (model.vocab_size + model.max_position_embeddings + 2) * hidden + layers * block == 124_439_808


def test_configurations_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().model.num_layers = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SECTIONS["parallel"](2)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Small(Section):
    """A section whose field has few values and may be left out."""

    few: Annotated[int | None, Range(1, 3)] = None
    """A number."""


def test_a_flag_of_few_values_may_be_left_out() -> None:
    said = "--few 0 must be at least 1 and at most 3: use 1, 2 or 3, or leave the flag out"
    assert _Small(few=0).wrong_fields() == {"few": said}


def test_an_equal_word_counts_more_than_a_similar_one() -> None:
    assert nearest_name("heads", ["v-head-dim", "num-attention-heads"]) == "num-attention-heads"
    assert nearest_name("optimizer.learning_rate", ["optimizer.rate", "a.learning_ratio"]) == "optimizer.rate"
    assert nearest_name("100", ["a100", "h200"]) == "a100"
    assert nearest_name("anything", []) is None


# ---- resolved sections -----------------------------------------------------------------------------------------------


def test_a_resolved_section_has_no_unknown_sizes_and_the_ranges_of_the_one_it_narrows() -> None:
    model = ModelConfig(vocab_size=8).resolve(seq_length=16)
    assert (model.vocab_size, model.max_position_embeddings, model.ffn_hidden_size) == (8, 16, 4 * 768)
    assert ModelConfig().resolve(seq_length=16, vocab_size=9).vocab_size == 9
    assert list(field_infos(ResolvedModel)) == list(field_infos(ModelConfig))  # the order of config.toml
    for name, info in field_infos(ResolvedModel).items():
        declared = field_infos(ModelConfig)[name]
        assert (info.range, info.choices, info.flags) == (declared.range, declared.choices, declared.flags)
    for value, message in ((None, "--vocab-size is missing"), (0, "--vocab-size 0 must be at least 1")):
        (problem,) = dataclasses.replace(model, vocab_size=value).problems()  # type: ignore[arg-type]
        assert problem.startswith(message)
    with pytest.raises(TypeError, match="vocab_size"):
        ResolvedModel(num_query_groups=1, kv_channels=1, ffn_hidden_size=1, max_position_embeddings=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="vocabulary"):
        make(vocab_size=None).resolve(1)


def test_a_resolved_configuration_is_of_its_own_kind() -> None:
    gpt, bert = make().resolve(1), BertConfig(training=TrainingConfig(train_iters=1)).resolve(1, vocab_size=9)
    assert (type(gpt), type(bert)) == (ResolvedConfig, ResolvedBertConfig)
    assert type(bert.resolve(1)) is ResolvedBertConfig
    assert list(sections_of(ResolvedBertConfig)) == list(sections_of(BertConfig))
    assert (bert.bert.mask_prob, bert.bert.sentence_task, bert.presets) == (0.15, "nsp", BertConfig.presets)
