"""What a run does where no flag says otherwise: decoders, presets, BERT, Megatron-LM's scripts, and a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint.check import settings_to_continue
from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.manifest import Manifest
from megacore.config import Config
from tests.unit import refusals
from tests.unit.refusals import GOOD, parse

alone = refusals.alone  # fixture
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
