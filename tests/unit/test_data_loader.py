"""Blends and batches: which sample comes when, on every layout, and generated data that can be learned."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import random
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megacore.data.gpt.blend import BlendedDataset, blend_index, blend_order
from megacore.data.gpt.mock import MockDataset
from megacore.data.loading.loader import BatchLoader, Microbatch
from megacore.errors import DataError


class Numbered:
    """Sample k is full of the number k; one of them may be unusable."""

    def __init__(self, length: int, bad: int | None = None, offset: int = 0) -> None:
        self.length, self.bad, self.offset = length, bad, offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        assert 0 <= index < self.length
        if index == self.bad:
            raise DataError(f"sample {index} is unusable")
        tokens = np.full(3, index + self.offset)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": np.ones(3, np.float32)}


# ---- blends ----------------------------------------------------------------------------------------------------------


def worst_deviation(order: NDArray[np.int16], weights: list[float]) -> float:
    """The largest |count - weight * n| of any dataset over all prefixes."""
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    return float(np.abs(counts - shares * np.arange(1, len(order) + 1)[:, None]).max())


def test_every_prefix_holds_each_share_to_within_one() -> None:
    """So equal weights take turns. Largest error first would be off by more with the second weights."""
    rng = random.Random(0)
    drawn = [[rng.random() ** rng.choice([1, 2, 8]) + 1e-3 for _ in range(rng.randint(1, 12))] for _ in range(150)]
    for weights in ([2.0, 2.0, 2.0], [0.0026, 0.1411, 0.0101, 0.0026, 0.8384, 0.0026, 0.0026], *drawn):
        assert worst_deviation(blend_order(weights, 400), weights) < 1
    assert zlib.crc32(blend_order([0.5, 0.3, 0.2], 400).tobytes()) == 2504754347, "the order of today"


def test_a_blend_takes_each_dataset_in_its_own_order() -> None:
    index = blend_index([0.5, 0.3, 0.2], 200)
    blend = BlendedDataset([Numbered(200, offset=1000 * d) for d in range(3)], index)
    values = [int(blend[k]["tokens"][0]) for k in range(200)]
    for d in range(3):
        mine = [value - 1000 * d for value in values if value // 1000 == d]
        assert mine == list(range(len(mine)))
    assert Counter(value // 1000 for value in values) == {0: 100, 1: 60, 2: 40}
    with pytest.raises(IndexError):
        blend[200]


# ---- batches ---------------------------------------------------------------------------------------------------------


def numbers(loader: BatchLoader, steps: int | None = None) -> list[list[list[int]]]:
    """Sample numbers by step and microbatch."""
    return [[m.tokens[:, 0].tolist() for m in step] for step in itertools.islice(loader, steps)]


def loader(
    length: int = 40, rank: int = 0, ranks: int = 1, *, micro: int = 2, bad: int | None = None, **more: Any
) -> BatchLoader:
    """Of numbered samples, for one of the data-parallel ranks."""
    sizes: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": 8, "rank": rank, "ranks": ranks}
    return BatchLoader(Numbered(length, bad), Microbatch, **sizes | more)


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (8, 1), (3, 4)])
def test_samples_of_a_step_do_not_depend_on_the_layout(micro: int, dp: int) -> None:
    batch = 24
    ranks = [numbers(loader(100, d, dp, micro=micro, global_batch_size=batch)) for d in range(dp)]
    for step in range(100 // batch):
        for j, d in itertools.product(range(batch // (micro * dp)), range(dp)):
            first = step * batch + (j * dp + d) * micro
            assert ranks[d][step][j] == list(range(first, first + micro))
    assert all(len(rank) == 100 // batch for rank in ranks)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_from_the_consumed_samples_alone(num_workers: int) -> None:
    whole = loader(80, 1, 2, num_workers=num_workers)
    assert numbers(whole, 4)[3] == [[26, 27], [30, 31]]
    assert whole.consumed_samples == 32
    resumed = loader(80, 1, 2, num_workers=num_workers, consumed_samples=32)
    assert numbers(resumed) == numbers(whole)
    assert resumed.consumed_samples == 80


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unusable_sample_is_one_clear_error(num_workers: int) -> None:
    steps = loader(bad=11, num_workers=num_workers)
    next(steps)
    with pytest.raises(DataError, match=r"^sample 11 is unusable$"):
        next(steps)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_begins_again_with_the_same_processes(num_workers: int) -> None:
    steps = loader(40, 1, 2, consumed_samples=8, num_workers=num_workers)
    processes = {process.pid for process in multiprocessing.active_children()}
    whole = numbers(steps)
    assert len(whole) == 4
    for count in (4, 2, 0, 1):  # where it is rewound: at the end, on the way, at once
        steps.rewind()
        assert steps.consumed_samples == 8
        assert numbers(steps, count) == whole[:count]
    assert {process.pid for process in multiprocessing.active_children()} == processes


def test_the_processes_of_a_forgotten_loader_end() -> None:
    others = multiprocessing.active_children()
    steps = loader(num_workers=2)
    next(steps)
    workers = [process for process in multiprocessing.active_children() if process not in others]
    assert len(workers) == 2
    cycle: list[object] = [steps]
    cycle.append(cycle)  # a trainer is part of such cycles
    del steps, cycle
    gc.collect()
    assert not any(process.is_alive() for process in workers)


# ---- generated data --------------------------------------------------------------------------------------------------


def test_generated_samples_are_a_function_of_seed_stream_and_number() -> None:
    def sample(seed: int, stream: int, k: int) -> list[int]:
        return MockDataset(1000, 64, 50, seed, stream=stream)[k]["tokens"].tolist()

    assert sample(1, 0, 7) == sample(1, 0, 7)
    assert len({tuple(sample(*key)) for key in itertools.product((1, 2), (0, 1, 2), (0, 1, 2))}) == 18
    one = MockDataset(1000, 64, 50, 1)[3]
    assert one["tokens"][1:].tolist() == one["labels"][:-1].tolist()
    assert one["loss_mask"].tolist() == [1.0] * 64


def test_generated_tokens_can_be_learned_by_looking_one_token_back() -> None:
    train = MockDataset(5000, 256, 200, seed=1)
    valid = MockDataset(5000, 256, 50, seed=1, stream=1)
    counts: dict[int, Counter[int]] = {}
    for k in range(200):
        for token, label in zip(train[k]["tokens"].tolist(), train[k]["labels"].tolist(), strict=True):
            counts.setdefault(token, Counter())[label] += 1

    def loss(token: int, label: int) -> float:
        return -math.log((counts[token][label] + 0.1) / (counts[token].total() + 6.4))

    pairs = [p for k in range(50) for p in zip(valid[k]["tokens"].tolist(), valid[k]["labels"].tolist(), strict=True)]
    assert sum(loss(*pair) for pair in pairs) / len(pairs) == pytest.approx(0.74, abs=0.05)
    unigram = Counter(token for token, _ in pairs)
    entropy = -sum(n / len(pairs) * math.log(n / len(pairs)) for n in unigram.values())
    assert entropy > 4.1
