"""--valid-sets: each set is evaluated by itself, as by a run that has no other, on every layout and in every file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import validate
from megacore.config.missing_files import missing_files
from megacore.data.gpt.blend import NamedSets
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.parity.runs import Layout, RaggedData, make_config, make_trainer
from tools.report import main as report

STEPS, EVALUATED = 2, 2 * 8  # samples of an evaluation: two global batches
Changes = dict[str, Any]


class Later(RaggedData):
    """Other samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index + 1000)


def trainer_of(layout: Layout, directory: Path | str, data: Any, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": STEPS, "eval_interval": 1, "eval_iters": 2, "micro_batch_size": 1}
    config = make_config(layout, directory, **{**fixed, **changes})
    mesh = Mesh(device=torch.device("cpu")) if layout == (1, 1, 1) else build_mesh(config.parallel)
    made = make_trainer(config, mesh, RaggedData(64))
    return Trainer(config, mesh, made.task, RaggedData(64), data)


def evaluations(directory: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if any(key.startswith("eval/") for key in record)]


def both() -> NamedSets:
    return NamedSets({"": RaggedData(EVALUATED), "code": Later(EVALUATED)})


def on_ranks(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> None:
    trainer_of(layout, directory, both(), **changes).run()


def losses(directory: Path) -> list[tuple[float, float]]:
    return [(record["eval/loss"], record["eval/code/loss"]) for record in evaluations(directory)]


def test_each_set_is_evaluated_as_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of((1, 1, 1), tmp_path / "both", both(), csv=True).run()
    assert "eval loss" in (said := capsys.readouterr().out) and "code/loss" in said
    found = losses(tmp_path / "both")
    for number, data in enumerate((RaggedData(EVALUATED), Later(EVALUATED))):
        trainer_of((1, 1, 1), tmp_path / str(number), data).run()
        assert [record["eval/loss"] for record in evaluations(tmp_path / str(number))] == [two[number] for two in found]
    assert len(found) == STEPS
    assert "eval/code/loss" in (tmp_path / "both" / "metrics.csv").read_text().splitlines()[0]
    assert report([str(tmp_path / "both"), *words(output=tmp_path / "page.html")]) == 0
    assert "Loss on code" in (tmp_path / "page.html").read_text()
    changes = {"load": str(tmp_path / "both"), "skip_train": True}
    trainer_of((1, 1, 1), tmp_path / "again", both(), **changes).run()
    assert losses(tmp_path / "again") == found[-1:]


def test_refusals(tmp_path: Path) -> None:
    given = {"data_path": ("d",), "mock_data": False, "valid_sets": ("a=x", "b", "a=y", "a/b=z", "c=")}
    example = "use, for example, --valid-sets wiki=data/wiki_text_document code=data/code_text_document"
    config = make_config((1, 1, 1), tmp_path, eval_interval=0, **given)
    assert validate(config, 1) == [
        f"--valid-sets b is not NAME=PREFIX: {example}",
        "--valid-sets a/b=z: the name 'a/b' becomes part of a metric's name, and must be 1 to 64 letters, digits, '_', "
        f"'.' or '-', the first a letter or digit: {example}",
        f"--valid-sets c= is not NAME=PREFIX: {example}",
        "--valid-sets has the name a 2 times: give each set its own name",
        "--valid-sets has no effect with --eval-interval 0, which turns evaluation off: leave one of them out",
    ]
    (problem,) = validate(make_config((1, 1, 1), tmp_path, eval_interval=1, valid_sets=("a=x",)), 1)
    assert problem == "--valid-sets a=x has no effect with --mock-data: leave one of them out"
    assert [problem.partition(":")[0] for problem in missing_files(config)] == ["--data-path d", "--valid-sets a=y"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 1), {"ema_decay": 0.5, "eval_ema": True}),
        ((1, 2, 1), {"schedule": "zero-bubble"}),
        ((1, 1, 2), {"zero_stage": 3}),
    ],
    ids=str,
)
def test_every_layout_evaluates_every_set(layout: Layout, changes: Changes, tmp_path: Path) -> None:
    run_distributed(on_ranks, 2, str(tmp_path / "two"), layout, changes, timeout=120)
    trainer_of((1, 1, 1), tmp_path / "one", both(), **changes).run()
    for found, expected in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
