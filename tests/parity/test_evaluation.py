"""What an evaluation reports, against torch's own cross-entropy; with --valid-sets each set by itself, as a run that
has no other reports it; on every layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megacore.data.gpt.blend import NamedSets
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.matrix.programs import PROGRAMS
from tests.parity.bert_runs import RaggedPairs, make_bert_config, make_bert_trainer
from tests.parity.runs import VOCAB, Layout, RaggedData, make_config, trainer_of
from tools.report import main as report

Changes = dict[str, Any]
STEPS, EVALUATED = 2, 2 * 8  # samples of an evaluation: two global batches


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, from its metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval/loss" in record]


def test_an_evaluation_is_the_negative_log_likelihood_of_the_same_batches_every_time(tmp_path: Path) -> None:
    trainer = trainer_of((1, 1, 1), tmp_path, label_smoothing=0.2, z_loss=0.1, eval_iters=3, hidden_dropout=0.5)
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


@pytest.mark.parametrize("off", ["eval_interval", "eval_iters"])
def test_an_interval_or_a_length_of_0_is_no_evaluation(off: str, tmp_path: Path) -> None:
    trainer_of((1, 1, 1), tmp_path, **{"train_iters": 2, "eval_interval": 1, "eval_iters": 1, off: 0}).run()
    assert not evaluations(tmp_path)


# ---- several sets


class Later(RaggedData):
    """Other samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index + 1000)


def both() -> NamedSets:
    return NamedSets({"": RaggedData(EVALUATED), "code": Later(EVALUATED)})


def evaluating(directory: Path, data: Any, **changes: Any) -> Trainer:
    """A run of two steps, each of which an evaluation of `data` follows."""
    fixed = {"num_layers": 2, "train_iters": STEPS, "eval_interval": 1, "eval_iters": 2, "micro_batch_size": 1}
    config = make_config((1, 1, 1), directory, **{**fixed, **changes})
    mesh = build_mesh(config.parallel)
    return Trainer(config, mesh, GPTTask(config, mesh), RaggedData(64), data)


def losses(directory: Path) -> list[tuple[float, float]]:
    return [(record["eval/loss"], record["eval/code/loss"]) for record in evaluations(directory)]


def test_each_set_is_evaluated_as_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without training a checkpoint gives the loss of the evaluation with which the training ended, and nothing is
    saved; that the run is over already is no obstacle."""
    evaluating(tmp_path / "both", both(), csv=True).run()
    assert "eval loss" in (said := capsys.readouterr().out) and "code/loss" in said
    found = losses(tmp_path / "both")
    for number, data in enumerate((RaggedData(EVALUATED), Later(EVALUATED))):
        evaluating(tmp_path / str(number), data).run()
        assert [record["eval/loss"] for record in evaluations(tmp_path / str(number))] == [two[number] for two in found]
    assert len(found) == STEPS
    assert "eval/code/loss" in (tmp_path / "both" / "metrics.csv").read_text().splitlines()[0]
    assert report([str(tmp_path / "both"), *words(output=tmp_path / "page.html")]) == 0
    assert "Loss on code" in (tmp_path / "page.html").read_text()
    evaluating(tmp_path / "again", both(), load=str(tmp_path / "both"), skip_train=True, train_iters=1).run()
    assert losses(tmp_path / "again") == found[-1:]
    assert evaluations(tmp_path / "again")[0]["step"] == STEPS
    assert not list((tmp_path / "again").glob("step_*"))


# ---- layouts

PLACES: dict[str, list[tuple[Layout, Changes]]] = {
    "gpt2": [((2, 2, 1), {"sequence_parallel": True}), ((2, 1, 1), {"cp": 2})],
    "softmax": [((2, 1, 2), {"ep": 2, "zero_stage": 3})],
    "bert": [((2, 2, 1), {"sequence_parallel": True})],
}


def evaluated(rank: int, world_size: int, directory: str) -> list[dict[str, float]]:
    """What an evaluation of two sets reports before the first step, on one process or on each layout of four."""
    for number, (name, layout, changes) in enumerate((n, *place) for n, places in PLACES.items() for place in places):
        options = PROGRAMS[name] | {"num_layers": 2, "eval_iters": 2} | (changes if world_size > 1 else {})
        place = f"{directory}/{number}"
        if name == "bert":
            bert = make_bert_config(layout if world_size > 1 else (1, 1, 1), place, **options)
            trainer = make_bert_trainer(bert, build_mesh(bert.parallel))
        else:
            config = make_config(layout if world_size > 1 else (1, 1, 1), place, **options)
            mesh = build_mesh(config.parallel)
            trainer = Trainer(config, mesh, GPTTask(config, mesh), RaggedData(64), both())
        trainer.evaluate()
    return [
        {name: value for name, value in record.items() if name.startswith("eval/")}
        for number in range(sum(map(len, PLACES.values())) if rank == 0 else 0)
        for record in evaluations(Path(directory) / str(number))
    ]


def test_an_evaluation_is_the_same_on_every_layout(tmp_path: Path) -> None:
    expected, found = (run_distributed(evaluated, n, str(tmp_path / str(n)), stay=True)[0] for n in (1, 4))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    bert = expected[-1]
    assert bert["eval/loss"] == pytest.approx(bert["eval/mlm_loss"] + bert["eval/sentence_loss"], rel=1e-12)
    assert 0 <= bert["eval/mlm_accuracy"] < 0.1 < bert["eval/sentence_accuracy"] < 0.9


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
