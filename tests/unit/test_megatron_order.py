"""--sample-order megatron: Megatron-Core's samples in its order, by lists that megatron-core 0.16.1 made, and by the
package itself where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from megacore.config import Config, DataConfig, ModelConfig, TrainingConfig
from megacore.data.gpt.build import build_datasets
from megacore.errors import DataError
from tests.unit import data_bytes

LENGTHS = (7, 3, 12, 1, 9, 5, 20, 2, 6, 8)
Case = tuple[int, int, int]  # samples, sequence length, seed
# The first token of each sample, and a sum over all labels. One epoch; two, of which the last is shuffled by itself;
# two shuffled together; several of both kinds.
GOLDEN: dict[Case, tuple[list[int], int]] = {
    (10, 7, 1): ([61, 53, 39, 11, 23, 46, 68, 18, 26, 1], 13088),
    (20, 7, 1): ([64, 19, 71, 38, 18, 37, 52, 2, 23, 10, 44, 27, 6, 12, 45, 51, 71, 25, 32, 11], 53675),
    (29, 5, 3): (
        [
            *(43, 17, 63, 1, 28, 48, 22, 72, 24, 36, 58, 38, 38, 19, 53),
            *(48, 66, 2, 43, 59, 67, 29, 62, 12, 71, 14, 6, 33, 53),
        ],
        85798,
    ),
    (60, 4, 7): (
        [
            *(25, 38, 73, 72, 6, 13, 37, 6, 5, 55, 68, 2, 33, 58, 10, 29, 29, 50, 47, 39),
            *(31, 19, 21, 63, 69, 62, 19, 54, 10, 1, 43, 27, 42, 58, 46, 51, 42, 71, 11, 67),
            *(37, 54, 63, 25, 2, 33, 46, 58, 50, 38, 17, 11, 15, 15, 10, 35, 61, 27, 23, 18),
        ],
        280593,
    ),
}
BLEND = (
    [
        *(1098, 66, 1010, 1246, 19, 1106, 1130, 63, 1040, 1165, 42, 1229, 1222, 1084, 49, 1128, 1285, 12, 1274, 1147),
        *(59, 1205, 1231, 1121, 4, 1137, 1211, 27, 1264, 1073, 73, 1189, 1017, 1009, 30, 1140, 1192, 46, 1053, 1023),
    ],
    4750485,
)


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
    assert summary(samples((40, 7, 5), "0.3", paths[0], "0.7", paths[1])) == BLEND


def test_a_blend_without_weights_is_one_epoch(paths: tuple[str, str]) -> None:
    assert len(samples((50, 7, 5), *paths)) == 50  # 10 and 42 in an epoch
    with pytest.raises(DataError, match="has 52 samples, and 53 are needed: give weights"):
        samples((53, 7, 5), *paths)


@pytest.mark.parametrize("case", [*GOLDEN, (43, 5, 3), (200, 3, 11)], ids=str)
def test_the_package_itself_agrees(case: Case, paths: tuple[str, str], tmp_path: Path) -> None:
    core = pytest.importorskip(
        "megatron.core.datasets.gpt_dataset", reason="needs megatron-core: pip install megatron-core"
    )
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    count, seq_length, seed = case

    class Tokenizer:
        unique_identifiers: ClassVar[dict[str, str]] = {}
        eod, pad, vocab_size = 0, 1999, 2000

    config = core.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([paths[0]], None),
        split="1,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    build = builder.BlendedMegatronDatasetBuilder(core.GPTDataset, [count, 0, 0], lambda: True, config)
    (theirs, *_), ours = build.build(), samples(case, paths[0])
    for index in range(count):
        assert theirs[index]["tokens"].tolist() == ours[index]["tokens"].tolist(), index
        assert theirs[index]["labels"].tolist() == ours[index]["labels"].tolist(), index
