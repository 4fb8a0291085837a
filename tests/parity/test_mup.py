"""--mup-base-width: table 8 of the paper, parameter by parameter; the coordinate check."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import validate
from megacore.train.trainer import Trainer
from tests.parity import runs
from tests.parity.runs import gather, make_config, outcome_of
from tools import mup_check

HIDDEN = ("qkv.weight", "output.weight", "up.weight", "down.weight")


def trainer_of(directory: Path, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": 3, "micro_batch_size": 1, "lr_warmup_iters": 1}
    return runs.trainer_of((1, 1, 1), directory, **{**fixed, **changes})


def test_table_8(tmp_path: Path) -> None:
    """Four times the base width, and heads of twice the size."""
    mup = {"mup_base_width": 16, "mup_base_head_size": 8}
    wide, usual = (
        trainer_of(tmp_path, hidden_size=64, untie_embeddings_and_output_weights=True, **changes)
        for changes in (mup, {})
    )
    model = wide.config.model
    assert model.logits_divisor == 4
    assert model.score_multiplier == pytest.approx(math.sqrt(8) / 16)
    drawn, plain = (gather(trainer, trainer.mesh, lambda owned: owned.master) for trainer in (wide, usual))
    for local in wide.model.data_parallel.segments:
        name, hidden = local.spec.name, local.spec.name.endswith(HIDDEN)
        torch.testing.assert_close(drawn[name], plain[name] / (2 if hidden else 1))
        assert local.run.scale.lr == (0.25 if hidden else 1), name
        assert local.run.scale.weight_decay == (4 if hidden else 1), name
        assert not local.run.scale.frozen


def test_the_base_width_is_the_usual_model(tmp_path: Path) -> None:
    base, usual = (outcome_of(trainer_of(tmp_path, **changes)) for changes in ({"mup_base_width": 32}, {}))
    assert base.losses == usual.losses


def test_the_resolved_configuration_is_resolved_to_itself(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, mup_base_width=16, mup_base_head_size=4)
    assert validate(config, 1) == []
    assert config.resolve(1) == config


def test_changes_do_not_depend_on_the_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The coordinate check: Yang et al. 2022, appendix D.1."""
    picture = tmp_path / "mup.svg"
    assert mup_check.main(["--widths", "32", "64", "128", "--steps", "4", "-o", str(picture)]) == 0
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:5]]
    hidden, logits, usual_hidden, usual_logits = (float(slope) for _, slope in rows)
    assert abs(hidden) < 0.2
    assert abs(logits) < 0.25
    assert usual_hidden > 0.4
    assert usual_logits > 0.6
    assert all(f">change of {quantity}, muP<" in picture.read_text() for quantity in mup_check.QUANTITIES)
    assert mup_check.main(["--widths", "30", "64"]) == 2
    assert "must be two or more multiples of 16" in capsys.readouterr().err
