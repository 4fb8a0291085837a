"""TOML files: each problem is reported with its place in the file, and none hides another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacore.config import Config
from megacore.config.cli import load_toml, save_toml
from megacore.config.toml import read_toml
from megacore.errors import ConfigError
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

alone, refuse = refusals.alone, refusals.refuse  # fixtures


@pytest.mark.parametrize(
    "text, words",
    [
        ("[model]\nnum_layers = '12'", ("line 2", "[model] num_layers = '12'", "whole number")),
        ("[model]\nnum_layers = 1.5", ("line 2", "num_layers = 1.5", "whole number")),
        ("[model]\nnum_layers = true", ("num_layers = true", "whole number")),
        ("[optimizer]\n\nlr = 'x'", ("line 3", "lr = 'x'", "a number")),
        ("[optimizer]\nlr = true", ("lr = true", "a number")),
        ("[data]\nmock_data = 1", ("mock_data = 1", "true or false")),
        ("[data]\nsplit = [1, 2]", ("split = [1, 2]", "a string")),
        ("[data]\ndata_path = 'x'", ("data_path = 'x'", "array of strings")),
        ("[data]\ndata_path = [0.5, 'x']", ("data_path", "array of strings")),
        ("[optimizer]\nlr = 1979-05-27", ("lr = ", "a number")),
        (f"[optimizer]\nlr = 1{'0' * 400}", ("lr = ", "a number")),
        ("[optimizer]\nlr = inf", ("--lr inf", "finite")),
        ("[model]\nnum_layer = 1", ("line 2", "num_layer is not a key", "num_layers, under [model]")),
        ("[model]\nnum-layers = 1", ("line 2", "did you mean num_layers")),
        ("[model]\nlr = 1.0", ("line 2", "lr belongs under [optimizer]")),
        ("[parallel]\ntensor_model_parallel_size = 2", ("did you mean tp, under [parallel]",)),
        ("[data]\nqqq = 2", ("line 2", "qqq is not a key", "docs/reference/configuration.md")),
        ("[data.sub]\nx = 2", ("sub is not a key",)),
        ("[modle]\nnum_layers = 1", ("line 1", "[modle] is not a table", "did you mean [model]?")),
        ("num_layers = 1", ("line 1", "num_layers belongs under [model]")),
        ("model = 1", ("model is a table", "[model]")),
        ("[[model]]\nnum_layers = 1", ("model is a table",)),
        ("[model\n", ("is not valid TOML", "line 1")),
        ("[model]\n[model]\n", ("is not valid TOML",)),
        ("x = " + "[" * 5000, ("is not valid TOML",)),
        ("[model]\nx = \udcff", ("is not valid TOML", "utf-8")),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(
    text: str, words: tuple[str, ...], refuse: Refuse, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    (problem,) = problems(refuse(*GOOD, "--config", str(file)))
    assert all(word in problem for word in words), problem
    assert str(file) in problem or "--lr inf" in problem


def test_a_file_of_an_earlier_version_has_the_settings_of_optimizers_in_their_old_table(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[optimizer]\nadam_beta2 = 0.95\n\n[data]\nmock_data = true\n\n[training]\ntrain_iters = 1\n")
    config: Config = load_toml(file)
    assert config.adamw.adam_beta2 == 0.95
    save_toml(config, tmp_path / "again.toml")
    assert "[adamw]\nadam_beta1 = 0.9\nadam_beta2 = 0.95\n" in (tmp_path / "again.toml").read_text()
    assert load_toml(tmp_path / "again.toml") == config


@pytest.mark.parametrize("flag", ["--config", "--schedule-csv", "--tokenizer"])
@pytest.mark.parametrize("kind", ["device", "pipe", "giant"])
def test_what_could_be_read_for_ever_is_refused_at_once(flag: str, kind: str, refuse: Refuse, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "giant":
        if flag == "--tokenizer":
            pytest.skip("a tokenizer may well be large")
        path.touch()
        os.truncate(path, 1 << 40)
    (problem,) = problems(refuse(*GOOD, flag, str(path)))
    assert f"{flag} {path} " in problem
    assert (" bytes, more than" if kind == "giant" else " no" if flag == "--tokenizer" else " is not a") in problem


@pytest.mark.parametrize("flag", ["--load", "--tokenizer", "--schedule-csv", "--data-path", "--output-dir"])
def test_an_empty_path_is_one_problem(flag: str, refuse: Refuse) -> None:
    given = [word for word in GOOD if flag != "--data-path" or word != "--mock-data"]
    (problem,) = problems(refuse(*given, flag, ""))
    assert f"{flag} is empty" in problem


def test_flags_mend_what_a_file_gets_wrong_only_by_name(refuse: Refuse, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\ntrain_iter = 5\n[data]\nmock_data = true\n[model]\nvocab_size = 5\n")
    (problem,) = problems(refuse("--config", str(file)))  # and not that --train-iters is missing as well
    assert "train_iters" in problem


def test_load_toml_raises_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\ntrain_iters = 'a'\nsave = 3\n")
    with pytest.raises(ConfigError) as error:
        load_toml(file)
    assert len(error.value.problems) == 2
    file.write_text("[training]\ntrain_iters = 0\n[data]\nmock_data = true\n")
    with pytest.raises(ConfigError, match="--train-iters 0"):
        load_toml(file)


@pytest.mark.parametrize("precision", ['precision = "fp32"', 'precision = "fp16"\nloss_scale = 128.0'])
def test_a_file_with_the_former_default_of_the_first_loss_scale_is_read(precision: str, tmp_path: Path) -> None:
    """A run of an earlier version wrote initial_loss_scale = 65536.0 also where it has no effect."""
    file = tmp_path / "config.toml"
    file.write_text(f"[precision]\n{precision}\ninitial_loss_scale = 65536.0\n")
    assert parse(*GOOD, "--config", str(file)).precision.initial_loss_scale == 65536.0


@pytest.mark.parametrize("tables", [("optimizer", "adamw"), ("adamw", "optimizer")])
def test_a_key_in_its_table_and_in_that_of_an_earlier_version_is_refused(
    tmp_path: Path, tables: tuple[str, str]
) -> None:
    """Either of the two could be the one that is meant."""
    file = tmp_path / "both.toml"
    file.write_text(f"[{tables[0]}]\nadam_beta2 = 0.95\n\n[{tables[1]}]\nadam_beta2 = 0.98\n")
    (problem,) = read_toml(file).problems
    assert problem == f"{file} line 5: adam_beta2 is under [{tables[0]}] and under [{tables[1]}]: keep one"


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (["--seq-length", "16"], "derives it from the other flags, which gives 16"),
        (["--preset", "gpt2-tiny"], None),  # without the file's key: its seq_length, 24, and not the preset's
    ],
)
def test_a_note_on_a_kept_value_says_what_would_be_derived(
    flags: list[str], note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[data]\nseq_length = 24\n[model]\nmax_position_embeddings = 24\n")
    parse(*GOOD, "--config", str(file), *flags)
    said = capsys.readouterr().err
    assert "derives it" not in said if note is None else note in said
