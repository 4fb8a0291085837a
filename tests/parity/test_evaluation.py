"""What an evaluation reports, against torch's own cross-entropy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megacore.config.cli import load_toml
from megacore.parallel.mesh import Mesh
from megacore.train.output import output_directory
from tests.parity.bert_runs import RaggedPairs, make_bert_config, make_bert_trainer
from tests.parity.runs import VOCAB, RaggedData, make_config, make_trainer


def test_an_evaluation_is_the_negative_log_likelihood_of_the_same_batches_every_time(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, label_smoothing=0.2, z_loss=0.1, eval_iters=3, hidden_dropout=0.5)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")))
    first = trainer.evaluate()
    total, tokens = 0.0, 0.0
    assert trainer.valid_batches is not None
    trainer.valid_batches.rewind()
    for microbatch in itertools.chain.from_iterable(itertools.islice(trainer.valid_batches, 3)):
        with torch.no_grad():
            logits = trainer.model.chunks[0].eval()(microbatch.tokens)[..., :VOCAB]
        losses = F.cross_entropy(logits.double().flatten(0, 1), microbatch.labels.flatten(), reduction="none")
        total += float((losses * microbatch.loss_mask.flatten()).sum())
        tokens += float(microbatch.loss_mask.sum())
    assert first == pytest.approx(total / tokens, rel=1e-6)
    assert trainer.evaluate() == first


def test_without_training_a_checkpoint_is_evaluated_and_nothing_is_saved(tmp_path: Path) -> None:
    """The loss is that of the evaluation with which the training ended; that the run is over already is no obstacle."""
    changes: dict[str, Any] = {"train_iters": 2, "eval_interval": 2, "eval_iters": 2}
    mesh, data = Mesh(device=torch.device("cpu")), RaggedData(16)
    make_trainer(make_config((1, 1, 1), tmp_path / "a", **changes), mesh, data).run()
    (trained,) = evaluations(tmp_path / "a")
    changes |= {"load": str(tmp_path / "a"), "skip_train": True, "train_iters": 1}
    make_trainer(make_config((1, 1, 1), tmp_path / "b", **changes), mesh, data).run()
    (record,) = evaluations(tmp_path / "b")
    assert (record["step"], record["eval/loss"]) == (2, trained["eval/loss"])
    assert not list((tmp_path / "b").glob("step_*"))


@pytest.mark.parametrize("off", ["eval_interval", "eval_iters"])
def test_an_interval_or_a_length_of_0_is_no_evaluation(off: str, tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, **{"train_iters": 2, "eval_interval": 1, "eval_iters": 1, off: 0})
    make_trainer(config, Mesh(device=torch.device("cpu")), RaggedData(16)).run()
    assert not evaluations(tmp_path)


def test_an_evaluation_leaves_the_settings_of_the_training(tmp_path: Path) -> None:
    mesh = Mesh(device=torch.device("cpu"))
    for skip in (True, False, True):  # an evaluation writes them only where there are none
        with output_directory(make_config((1, 1, 1), tmp_path, skip_train=skip, eval_interval=1), mesh):
            pass
    assert not load_toml(tmp_path / "config.toml").training.skip_train


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, from its metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval/loss" in record]


class WithoutMasks(RaggedPairs):
    """Samples of which no token is predicted, and of which some are pairs, or none is."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}


@pytest.mark.parametrize("pairs", [True, False])
def test_what_nothing_was_predicted_of_has_no_figure(
    pairs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"train_iters": 2, "log_interval": 1, "eval_interval": 2, "eval_iters": 1}
    config = make_bert_config((1, 1, 1), tmp_path, sentence_task="nsp", **changes)
    trainer = make_bert_trainer(config, Mesh(device=torch.device("cpu")), WithoutMasks(16, packed=False, pairs=pairs))
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for kind, record in (("train", records[1]), ("eval", records[2])):
        assert record[f"{kind}/mlm_loss"] is None
        assert record.get(f"{kind}/mlm_accuracy") is None
        assert (record[f"{kind}/sentence_loss"] is not None) == pairs
        assert record[f"{kind}/loss"] == record[f"{kind}/sentence_loss"]
    lines = capsys.readouterr().out.splitlines()
    assert sum("mlm loss none" in line for line in lines) == 3
    assert any("eval loss none" in line and "mlm accuracy none" in line for line in lines) != pairs
    warnings = [line for line in lines if "no token that counts for the loss" in line]
    expected = ["warning: step 1 has no token", "warning: 2 of 2 logged steps had no token"]
    assert len(warnings) == (0 if pairs else 2)
    assert all(line.startswith(start) for line, start in zip(warnings, expected, strict=False))
