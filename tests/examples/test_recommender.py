"""examples/recommender: the bits of one process on any number of ranks, also through a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recommender
from clicks import COUNTS, FIELDS, generated, read
from dense_models import MODELS
from hashed_table import HashedTable, first_values
from hybrid_trainer import Recommender
from megacore.config import ParallelConfig
from megacore.errors import CheckpointError, DataError
from megacore.parallel.mesh import ALONE, join_job
from tests.distributed import run_distributed
from tests.examples.conftest import printed

BATCH, BLOCKS, EVICT_AFTER = 32, 4, 3
Outcome = tuple[list[float], list[float], dict[str, list[float]], list[int]]


def trained(rank: int, ranks: int, name: str, steps: int, load: Any = None, save: Any = None) -> Outcome:
    """Losses, scores, rows by id, and how many rows each eviction took, of this rank."""
    _, group = join_job(ParallelConfig(device="cpu"))
    model = Recommender(name, group, BLOCKS)
    if load is not None:
        model.load(load)
    losses, evicted = [], []
    for number in range(model.step, steps):
        losses.append(model.train(generated(number, BATCH)))
        evicted.append(model.embedding.table.evict(model.step - EVICT_AFTER))
    state = model.embedding.table.state()
    rows = {str(id): row for id, row in zip(state["ids"].tolist(), state["rows"].tolist(), strict=True)}
    if save is not None:
        model.save(save)
    return losses, model.scores(generated(999, BATCH)).tolist(), rows, evicted


def joined(outcomes: list[Outcome]) -> Outcome:
    """Of all ranks: each row is on one of them."""
    losses, scores, _, _ = outcomes[0]
    assert all((other[0], other[1]) == (losses, scores) for other in outcomes)
    rows = {id: row for outcome in outcomes for id, row in outcome[2].items()}
    assert len(rows) == sum(len(outcome[2]) for outcome in outcomes)
    return losses, scores, rows, [sum(counts) for counts in zip(*(each[3] for each in outcomes), strict=True)]


@pytest.mark.parametrize("name", ["dlrm", pytest.param("deepfm", marks=pytest.mark.slow)])
def test_four_ranks_compute_the_bits_of_one(name: str) -> None:
    alone = trained(0, 1, name, 6)
    assert sum(alone[3]) > 0, "rows were evicted"
    assert joined(run_distributed(trained, 4, name, 6)) == alone


@pytest.mark.parametrize("name", MODELS)
def test_an_untrained_model_has_about_the_loss_of_a_guess(name: str) -> None:
    assert Recommender(name, ALONE, BLOCKS).train(generated(0, 256)) == pytest.approx(math.log(2), abs=0.2)


def test_a_checkpoint_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    losses, *rest = trained(0, 1, "dlrm", 6)
    run_distributed(trained, 2, "dlrm", 3, None, tmp_path / "half")
    resumed = trained(0, 1, "dlrm", 6, tmp_path / "half")
    assert resumed[0] == losses[3:]
    assert list(resumed[1:3]) == rest[:2]
    assert joined(run_distributed(trained, 4, "dlrm", 6, tmp_path / "half"))[:3] == resumed[:3]
    with pytest.raises(CheckpointError, match="another model: use its --model"):
        Recommender("deepfm", ALONE, BLOCKS).load(tmp_path / "half")


def test_the_table_is_an_embedding_with_row_wise_adagrad() -> None:
    ids, columns = torch.tensor([7, 3, 7, 11]), 4
    table = HashedTable(columns)
    reference = nn.Embedding.from_pretrained(first_values(torch.arange(12), columns), freeze=False)
    squares = torch.zeros(12)
    for step in range(3):
        weights = torch.randn(4, columns, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(table.look_up(ids, step), reference(ids).detach(), rtol=0, atol=1e-6)
        table.update(ids, weights, lr=0.1)
        (gradient,) = torch.autograd.grad((reference(ids) * weights).sum(), reference.weight)
        squares += gradient.square().mean(1)
        reference.weight.data -= 0.1 * gradient / (squares.sqrt() + 1e-8).unsqueeze(1)
    assert len(table) == 3


def test_a_forgotten_id_starts_anew() -> None:
    table = HashedTable(2)
    table.look_up(torch.tensor([1, 2]), 1)
    table.update(torch.tensor([1, 2]), torch.ones(2, 2), lr=1.0)
    kept = table.look_up(torch.tensor([2]), 5)
    assert table.evict(unused_since=3) == 1
    assert torch.equal(table.peek(torch.tensor([1, 2])), torch.cat([first_values(torch.tensor([1]), 2), kept]))
    assert torch.equal(table.look_up(torch.tensor([1]), 6), first_values(torch.tensor([1]), 2))


def criteo_line(label: int, ids: list[int | None]) -> str:
    counts = ["", "5", "-1", *("0" for _ in range(COUNTS - 3))]
    return "\t".join([str(label), *counts, *("" if id is None else f"{id:08x}" for id in ids)])


def test_the_reader_takes_criteos_format(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    lines = [criteo_line(n % 2, [None, *(n * 7 + f for f in range(1, FIELDS))]) for n in range(5)]
    path.write_text("\n".join(lines) + "\n")
    found = list(read(path, 2))
    assert [batch.labels.tolist() for batch in found] == [[0.0, 1.0], [0.0, 1.0]]
    assert found[0].counts[0, :3].tolist() == pytest.approx([0.0, 1.7917595, 0.0])
    assert found[0].ids[1].tolist() == [2**32, *(7 + f + (f << 40) for f in range(1, FIELDS))]
    path.write_text(lines[0] + "\n" + lines[1] + "\t1\n")
    with pytest.raises(DataError, match="line 2 has 41 columns"):
        next(read(path, 2))
    path.write_text(lines[0].replace("\t5\t", "\tx\t") + "\n")
    with pytest.raises(DataError, match="line 1: could not convert string to float: 'x'"):
        next(read(path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_script_learns_and_prints_the_same_on_every_number_of_processes(name: str) -> None:
    argv = ["--model", name, "--steps", "150", "--evict-after", "40"]
    results = {ranks: run_distributed(printed, ranks, recommender.main, argv, init=False) for ranks in (1, 2)}
    endings = {ranks: texts[0][1].splitlines()[-1] for ranks, texts in results.items()}
    assert endings[1] == endings[2]
    assert float(endings[1].split()[-1]) > 0.65


def test_a_checkpoint_is_continued_and_never_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "a" / "clicks"
    model = Recommender("dlrm", ALONE, BLOCKS)
    model.train(generated(0, BATCH))
    model.train(generated(1, BATCH))
    Recommender.require_savable(saved)
    model.save(saved)
    Recommender.require_savable(saved)  # a checkpoint may be replaced
    assert recommender.main(["--load", str(saved), "--steps", "1"]) == 2
    assert "is at step 2: --steps 1 must not be less" in capsys.readouterr().err
