"""--sample-order megatron: Megatron-Core's samples in its order, by lists that megatron-core 0.16.1 made, and by the
package itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.config import Config, DataConfig, ModelConfig, TrainingConfig
from megacore.data.gpt.build import build_datasets
from tests.unit import data_bytes

LENGTHS = (7, 3, 12, 1, 9, 5, 20, 2, 6, 8)
Case = tuple[int, int, int]  # samples, sequence length, seed
# The first token of each sample, and a sum over all labels. One epoch; two, of which the last is shuffled by itself;
# two shuffled together; several of both kinds; and a blend.
MADE = json.loads(Path(__file__).with_name("megatron_order.json").read_text())
GOLDEN: dict[Case, tuple[list[int], int]] = {tuple(case): tuple(made) for case, made in MADE["cases"]}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    """Two datasets: documents of several lengths full of different tokens, and documents of ten."""
    documents, first = [], 1
    for length in LENGTHS:
        documents.append([list(range(first, first + length))])
        first += length
    data_bytes.write(tmp_path / "a", documents)
    data_bytes.write(tmp_path / "b", [[[1000 + 10 * i + j for j in range(10)]] for i in range(30)])
    return str(tmp_path / "a"), str(tmp_path / "b")


def samples(case: Case, *data_path: str, **data: Any) -> Any:
    """The training samples of a run of `case[0]` steps of one sample."""
    count, seq_length, seed = case
    config = Config(
        model=ModelConfig(vocab_size=2000),
        data=DataConfig(data_path=data_path, seq_length=seq_length, split="1", **{"sample_order": "megatron", **data}),
        training=TrainingConfig(train_iters=count, global_batch_size=1, seed=seed, eval_interval=0),
    ).resolve(1)
    return build_datasets(config).train


def summary(dataset: Any) -> tuple[list[int], int]:
    numbers = range(len(dataset))
    firsts = [int(dataset[k]["tokens"][0]) for k in numbers]
    return firsts, sum(int(dataset[k]["labels"].sum()) * (k + 1) for k in numbers)


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_samples_come_in_megatrons_order(case: Case, paths: tuple[str, str]) -> None:
    assert summary(samples(case, paths[0])) == GOLDEN[case]
    assert summary(samples(case, paths[0], sample_order="megacore")) != GOLDEN[case]


def test_a_blend_is_megatrons(paths: tuple[str, str]) -> None:
    assert summary(samples((40, 7, 5), "0.3", paths[0], "0.7", paths[1])) == tuple(MADE["blend"])
