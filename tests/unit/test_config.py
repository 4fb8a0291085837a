"""The configuration itself: wrong ones are refused by flag and with the way out, right ones resolved and saved."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.checkpoint.check import settings_to_continue
from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.manifest import Manifest
from megacore.config import SECTIONS, Config
from megacore.config import toml as config_file
from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import load_toml, parse_config
from megacore.config.fields import FieldInfo, field_docs, field_infos
from megacore.config.flags import all_fields
from megacore.config.missing_files import missing_files
from megacore.config.presets import GPT_PRESETS
from megacore.config.reproducible import canonical_blocks
from megacore.config.toml import save_toml
from megacore.config.training import TrainingConfig
from megacore.errors import ConfigError
from megacore.train.launch import for_device
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

alone, refuse = refusals.alone, refusals.refuse  # fixtures
PLAIN: dict[str, Any] = {"train_iters": 100, "mock_data": True, "vocab_size": 64}


def make(**values: Any) -> Config:
    """A configuration from values by field, over one that is valid."""
    values = {**PLAIN, **values}
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


def test_saved_configurations_read_back_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is replaced whole."""
    path = tmp_path / "deep" / "config.toml"
    for seed in range(40):
        rng = random.Random(seed)
        values = {name: random_value(info, rng) for name, info in all_fields().items() if name != "preset"}
        sections: dict[str, Any] = {
            name: section(**{key: values[key] for key in field_infos(section) if key in values})
            for name, section in SECTIONS.items()
        }
        config = Config(**sections)
        save_toml(config, path)
        assert _read_without_checks(path) == config
    before = path.read_bytes()
    assert before.startswith(b"# megacore 0."), "the version that wrote it"
    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_toml(make(seed=99), path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def _read_without_checks(path: Path) -> Config:
    given = config_file.read_toml(path)
    assert given.problems == []
    return Config(training=TrainingConfig(train_iters=1)).with_values(given.values)


@pytest.mark.parametrize("preset", [None, *GPT_PRESETS])
def test_a_resolved_configuration_given_back_is_equal(preset: str | None, tmp_path: Path) -> None:
    rng = random.Random(str(preset))
    argv = ["--mock-data", "--train-iters", str(rng.randint(2, 9)), "--lr", repr(rng.random())]
    argv += ["--preset", preset] if preset else ["--vocab-size", "17"]
    argv += rng.choice([[], ["--hidden-dropout", "0"], ["--num-layers", "5"], ["--adam-eps", "1e-12"]])
    first, path = parse(*argv), tmp_path / "config.toml"
    save_toml(first, path)
    assert parse("--config", str(path)) == load_toml(path).resolve(1) == first


# ---- the fields themselves -------------------------------------------------------------------------------------------


def test_every_field_is_documented_and_named_once() -> None:
    names = [name for section in SECTIONS.values() for name in field_infos(section)]
    assert len(names) == len(set(names))
    flags = [flag for info in all_fields().values() for flag in info.flags if " " not in flag]
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


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "kind"),  # a tokenizer may well be large
    [(flag, kind) for flag in ("--config", "--schedule-csv", "--tokenizer") for kind in ("pipe", "giant")][:-1],
)
def test_what_could_be_read_for_ever_is_refused_at_once(flag: str, kind: str, refuse: Refuse, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    (problem,) = problems(refuse(*GOOD, flag, str(path)))
    assert f"{flag} {path} " in problem
    assert (" bytes, more than" if kind == "giant" else " no" if flag == "--tokenizer" else " is not a") in problem


def test_what_is_no_text_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"[model]\nx = \xff")
    (problem,) = problems(refuse(*GOOD, "--config", str(tmp_path / "c.toml")))
    assert "is not valid TOML: 'utf-8'" in problem
    (problem,) = problems(refuse(*GOOD, "--output-dir", "\udcff"))
    assert r"--output-dir '\udcff' is not valid UTF-8" in problem


# ---- missing files and output directories ----------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that nobody, root included, can write")
def test_an_output_directory_that_nobody_can_write_is_named() -> None:
    for directory in ("/proc", "/proc/here"):
        (problem,) = missing_files(make(output_dir=directory))
        assert problem.startswith(f"--output-dir {directory} cannot be written: /proc: no file can be created there (")
        assert problem.endswith("use a directory in which you can create files, such as one in your home directory")


# ---- of BERT ---------------------------------------------------------------------------------------------------------


def parse_bert(*argv: str) -> ResolvedBertConfig:
    """The configuration that pretrain_bert.py takes from a command line."""
    return parse_config([*GOOD, *argv], prog="pretrain_bert.py", description="Pretrain a BERT.", kind=BertConfig)


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


# ---- reproducible blocks ---------------------------------------------------------------------------------------------

SHAPE = ["--seq-length", "64", "--hidden-size", "96", "--reproducible"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-attention-heads 8", 8),
        ("--num-attention-heads 12", 4),
        ("--num-attention-heads 3", 1),
        ("--num-attention-heads 8 --ffn-hidden-size 100", 4),
        ("--num-attention-heads 8 --reproducible-blocks 2", 2),
        ("--num-attention-heads 8 --num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 36", 4),
        ("--num-attention-heads 8 --num-query-groups 4 --qk-layernorm --qk-layernorm-all-heads", 4),
        ("--num-attention-heads 8 --no-reproducible", 1),
    ],
)
def test_the_model_decides_the_number_of_blocks(flags: str, expected: int) -> None:
    shape = SHAPE[:-1] if "--no-reproducible" in flags else SHAPE
    assert canonical_blocks(parse(*GOOD, *shape, *flags.split())) == expected


# ---- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = [*GOOD, "--num-experts", "8", "--disable-bias-linear"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of eight processes."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("ranks")
def test_whole_experts_per_rank_go_with_the_default_of_the_device(refuse: Refuse) -> None:
    flags = [*EXPERTS, "--tp", "2", "--etp", "1"]
    said = "--etp 1 with --tp 2 needs --sequence-parallel"
    assert parse(*flags, computes_on_cpu=lambda _: False).parallel.sequence_parallel is None
    for hooks in ({}, {"computes_on_cpu": lambda _: True}):
        (problem,) = problems(refuse(*flags, **hooks))
        assert problem.startswith(said) and problem.endswith(": add it, or use --etp 2")
    for off in (["--no-sequence-parallel"], ["--seq-length", "33"]):  # by a flag, and as --tp does not divide it
        assert said in refuse(*flags, *off, computes_on_cpu=lambda _: False)
    (problem,) = problems(refuse(*flags, "--seq-length", "0", computes_on_cpu=lambda _: False))
    assert problem.startswith("--seq-length 0")  # and nothing of a default that depends on it


@pytest.mark.usefixtures("ranks")
def test_a_run_whose_device_has_another_default_is_refused() -> None:
    config = parse(*EXPERTS, "--tp", "2", "--etp", "1", computes_on_cpu=lambda _: False)
    with pytest.raises(ConfigError, match=r"--etp 1 with --tp 2 needs --sequence-parallel.*: add it, or use --etp 2"):
        for_device(config, torch.device("cpu"))


# ---- what a run does where no flag says otherwise --------------------------------------------------------------------

FORMER = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "adam_beta2": 0.999, "weight_decay": 0.01, "min_lr": 0.0}
DECODER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "adam_beta2": 0.95, "weight_decay": 0.1, "min_lr": 3e-5}


def settings(config: Config) -> dict[str, Any]:
    """What the defaults of earlier versions were about, with the learning rate to a relative 1e-12."""
    model, optimizer = config.model, config.optimizer
    return {
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "adam_beta2": config.adamw.adam_beta2,
        "weight_decay": optimizer.weight_decay,
        "min_lr": pytest.approx(optimizer.end_lr, rel=1e-12, abs=0.0),
    }


# ---- evaluation and precision ----------------------------------------------------------------------------------------


def test_auto_precision_is_that_of_the_device() -> None:
    config = parse(*GOOD)
    assert config.precision.precision == "fp32"  # until the device is known
    assert config.for_device(on_cpu=True, bf16=False).precision.precision == "fp32"
    assert config.for_device(on_cpu=False, bf16=False).precision.precision == "fp32"
    chosen = config.for_device(on_cpu=False, bf16=True)
    assert chosen.precision.precision == "bf16"
    assert chosen.for_device(on_cpu=True, bf16=False).precision.precision == "bf16"  # once chosen, it stays
    for given in ("fp32", "fp16"):
        config = parse(*GOOD, "--precision", given)
        assert config.for_device(on_cpu=False, bf16=True).precision.precision == given
    script = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --seq-length 32"
    script += " --max-position-embeddings 32 --tensor-model-parallel-size 1"
    of_megatron = parse(*GOOD, *script.split())
    assert of_megatron.for_device(on_cpu=False, bf16=True).precision.precision == "fp32"


# ---- a run that resumes ----------------------------------------------------------------------------------------------


def checkpoint(run: Path, step: int = 5, changes: Mapping[str, Any] | None = None) -> Path:
    """A run of an earlier version: the manifest of its only checkpoint, with the defaults of that time."""
    directory = run / f"step_{step:08d}"
    directory.mkdir(parents=True)
    there = FORMER | {"precision": "fp32", "eval_iters": 100, "lr": 3e-4, **(changes or {})}
    topology = {"tp": 1, "pp": 1, "dp": 1}
    manifest = Manifest(step=step, consumed_samples=step, topology=topology, config={"training": there})
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return directory


@pytest.mark.parametrize("load", ["run", "step", "auto"])
def test_a_resumed_run_keeps_the_values_it_began_with(
    load: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = checkpoint(tmp_path)
    source = {"run": str(tmp_path), "step": str(step), "auto": "auto"}[load]
    flags = [*GOOD, "--load", source, "--output-dir", str(tmp_path), "--adam-beta2", "0.98"]
    config = parse(*flags, continued=settings_to_continue)
    assert settings(config) == FORMER | {"adam_beta2": 0.98}
    assert config.training.eval_iters == 100
    assert config.for_device(on_cpu=False, bf16=True).precision.precision == "fp32"
    (note,) = capfd.readouterr().err.splitlines()
    for text in ("--load keeps", "--hidden-dropout 0.1 instead of 0,", "--min-lr 0 instead of 3e-05"):
        assert text in note


def test_a_new_learning_rate_has_its_own_end(tmp_path: Path) -> None:
    checkpoint(tmp_path, changes={"min_lr": 1e-4})
    flags = [*GOOD, "--load", str(tmp_path), "--lr", "5e-5"]
    assert parse(*flags, continued=settings_to_continue).optimizer.min_lr == pytest.approx(5e-6, rel=1e-12)


@pytest.mark.parametrize("what", ["no checkpoint", "converted", "damaged", "unreadable values"])
def test_without_a_trained_checkpoint_the_defaults_are_todays(what: str, tmp_path: Path) -> None:
    if what == "converted":
        checkpoint(tmp_path, step=0)
    if what == "damaged":
        (checkpoint(tmp_path) / MANIFEST_NAME).write_text("{}")
    if what == "unreadable values":
        checkpoint(tmp_path, changes=dict.fromkeys(FORMER, "a") | {"precision": 1, "eval_iters": "b"})
    assert settings(parse(*GOOD, "--load", str(tmp_path), continued=settings_to_continue)) == DECODER
