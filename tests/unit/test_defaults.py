"""What a run does where no flag says otherwise: decoders, presets, BERT, Megatron-LM's scripts, and a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint.check import settings_to_continue
from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.manifest import Manifest
from megacore.config import Config, PrecisionConfig, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from tests.unit import refusals
from tests.unit.refusals import GOOD, parse

alone = refusals.alone  # fixture
FORMER = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "adam_beta2": 0.999,
    "weight_decay": 0.01,
    "min_lr": 0.0,
}
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


def bert(*flags: str) -> ResolvedConfig:
    return parse_config([*GOOD, *flags], prog="pretrain_bert.py", description="", kind=BertConfig)


# ---- each kind of model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--preset", "llama-3-8b"), ("--preset", "bloom-176b")])
def test_decoders_have_no_dropout_and_the_usual_adam(flags: tuple[str, ...]) -> None:
    assert settings(parse(*GOOD, *flags)) == DECODER


def test_the_last_learning_rate_follows_the_first() -> None:
    assert parse(*GOOD, "--lr", "6e-5").optimizer.min_lr == pytest.approx(6e-6, rel=1e-12)
    assert parse(*GOOD, "--lr", "6e-5", "--min-lr", "0").optimizer.min_lr == 0.0


def test_gpt2_presets_train_as_in_its_paper() -> None:
    assert settings(parse(*GOOD, "--preset", "gpt2-small")) == FORMER
    assert settings(parse(*GOOD, "--preset", "gpt2-small", "--adam-beta2", "0.95")) == FORMER | {"adam_beta2": 0.95}


def test_bert_trains_as_in_its_paper() -> None:
    assert settings(bert()) == FORMER
    assert settings(bert("--bert-style", "modern")) == FORMER | {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("flags", [("--preset", "gpt2-small"), ()])
def test_defaults_of_another_optimizer_do_not_count_as_given(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert parse(*GOOD, *flags, "--optimizer", "sgd").optimizer.optimizer == "sgd"
    file = tmp_path / "config.toml"  # of a run of an earlier version, which wrote the default of that time
    file.write_text('[optimizer]\noptimizer = "sgd"\n[adamw]\nadam_beta2 = 0.999\n')
    assert parse(*GOOD, *flags, "--config", str(file)).optimizer.optimizer == "sgd"
    assert bert("--optimizer", "sgd").optimizer.optimizer == "sgd"


# ---- evaluation and precision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"train-iters": 20}, 2),
        ({"train-iters": 5}, 1),
        ({"train-iters": 999}, 99),
        ({"train-iters": 100_000}, 100),
        ({"train-iters": 100_000, "eval-interval": 50}, 5),
        ({"train-iters": 100_000, "eval-interval": 50_000}, 100),
        ({"train-iters": 20, "eval-iters": 100}, 100),
        ({"train-iters": 20, "eval-iters": 0}, 0),
    ],
)
def test_an_evaluation_takes_at_most_a_tenth_of_the_steps_before_it(flags: dict[str, int], expected: int) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert parse("--mock-data", "--vocab-size", "64", *words).training.eval_iters == expected


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


def test_auto_precision_has_no_loss_scale() -> None:
    (problem,) = PrecisionConfig(loss_scale=128.0).problems()
    assert "--loss-scale 128 has no effect with --precision auto" in problem
    assert "--precision fp16" in problem


# ---- Megatron-LM's scripts -------------------------------------------------------------------------------------------

SCRIPT = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--micro-batch-size", "1"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--tensor-model-parallel-size", "1"),
]


def test_a_script_of_megatron_has_its_defaults_where_it_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    config = parse(*GOOD, *SCRIPT, "--weight-decay", "0.1")
    assert settings(config) == FORMER | {"weight_decay": 0.1}
    assert config.training.eval_iters == 100
    assert config.for_device(on_cpu=False, bf16=True).precision.precision == "fp32"
    (note,) = capfd.readouterr().err.splitlines()
    for text in ("--tensor-model-parallel-size", "--hidden-dropout 0.1 instead of 0,", "--adam-beta2 0.999 instead of"):
        assert text in note
    assert "--weight-decay" not in note


@pytest.mark.parametrize(
    "flags",
    [
        [*SCRIPT[:-2], "--tp", "1"],  # megacore's name
        [*SCRIPT, "--preset", "bloom-176b"],
        ["--tensor-model-parallel-size", "1"],  # without the sizes that Megatron-LM needs
    ],
)
def test_other_command_lines_have_ours(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert settings(parse(*GOOD, *flags)) == DECODER
    assert capfd.readouterr().err == ""


# ---- a run that resumes ----------------------------------------------------------------------------------------------


def test_adam_of_a_megatron_script_is_adamw(capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(*GOOD, *SCRIPT, "--optimizer", "adam").optimizer.optimizer == "adamw"
    assert "--optimizer adamw here" in capfd.readouterr().err
    assert parse(*GOOD, "--optimizer", "adam").optimizer.optimizer == "adam"


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


def test_a_file_of_an_earlier_version_with_a_pipeline_by_hand_is_read(tmp_path: Path) -> None:
    """Such a run wrote the defaults of that time also where they have no effect."""
    file = tmp_path / "config.toml"
    file.write_text('[parallel]\nschedule = "1f1b"\npipeline_balance = "parameters"\npipeline_layout = "E,12*t,H"\n')
    assert parse(*GOOD, "--config", str(file)).parallel.pipeline_layout == "E,12*t,H"
    csv = tmp_path / "own.csv"
    csv.write_text("0F0,0B0\n")
    file.write_text(f'[parallel]\nschedule = "1f1b"\nschedule_csv = "{csv}"\n')
    assert parse(*GOOD, "--config", str(file)).parallel.schedule_csv == str(csv)
