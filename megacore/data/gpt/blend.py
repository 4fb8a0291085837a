"""Several datasets as one: sample k comes from the dataset that has waited longest for its share.

After every prefix of n samples, each dataset has supplied its weight × n samples to within one. Taking the largest
error, as Megatron-LM does, misses that for weights 0.86, 0.10, 0.02, 0.02, 0.0015; the chairman assignment rule of
Tijdeman (Discrete Mathematics 32, 1980) does not: among datasets that have earned another sample, the one that is due
first.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megacore.data.gpt import megatron_order
from megacore.data.gpt.index_cache import Arrays, cached_arrays
from megacore.data.gpt.packing import KnowsPacking, Packing, mixed_packing

_VERSION = 1


class SampleDataset(Protocol):
    """A dataset of samples: what the loader reads."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """Sample `index`."""


@runtime_checkable
class KnowsDocuments(Protocol):
    """A dataset that can say which documents a sample consists of."""

    def documents_of(self, index: int) -> str:
        """The documents of sample `index` in words: numbers, and the dataset's prefix."""


def blend_order(weights: Sequence[float], num_samples: int) -> NDArray[np.int16]:
    """Which dataset each sample comes from. `weights`: Positive shares, in any unit. Returns int16 [num_samples]
    dataset numbers; in every prefix of n, |count - weight * n| < 1."""
    shares = [weight / sum(weights) for weight in weights]
    if len(shares) == 1:
        return np.zeros(num_samples, np.int16)
    slack = 1 / (2 * len(shares) - 2)
    counts = [0] * len(shares)
    # A dataset with c samples has earned the next when its share reaches c + slack, and must have it by c + 1 - slack.
    waiting = [(slack / share, number) for number, share in enumerate(shares)]
    heapq.heapify(waiting)
    ready: list[tuple[float, int]] = []
    order = np.empty(num_samples, np.int16)
    for n in range(1, num_samples + 1):
        while waiting and (waiting[0][0] <= n or not ready):
            number = heapq.heappop(waiting)[1]
            heapq.heappush(ready, ((counts[number] + 1 - slack) / shares[number], number))
        number = heapq.heappop(ready)[1]
        order[n - 1] = number
        counts[number] += 1
        heapq.heappush(waiting, ((counts[number] + slack) / shares[number], number))
    return order


def blend_index(
    weights: Sequence[float], num_samples: int, cache_dir: Path | None = None, *, megatron: bool = False
) -> Arrays:
    """The blend as two arrays, `dataset` int16 [n] and `sample` int64 [n]: sample k is number `sample[k]` of dataset
    `dataset[k]`. `weights`: positive shares, in any unit. `cache_dir`: None: the order stays in memory."""
    shares = (
        # Twice, as Megatron-LM does: the last bits decide which dataset is furthest behind.
        megatron_order.normalized(megatron_order.normalized(weights))
        if megatron
        else [float(weight) for weight in weights]
    )

    def build() -> Arrays:
        make = megatron_order.blend_order if megatron else blend_order
        order = make(shares, num_samples)
        sample = np.empty(num_samples, np.int64)
        for number in range(len(weights)):
            chosen = order == number
            sample[chosen] = np.arange(int(chosen.sum()))
        return {"dataset": order, "sample": sample}

    description = {"version": _VERSION, "blend": shares, "samples": num_samples}
    return cached_arrays(cache_dir, description | ({"order": "megatron"} if megatron else {}), build)


class BlendedDataset:
    """Datasets mixed by weight. `datasets`: the datasets; number i must hold as many samples as the index takes from
    it. `index`: what `blend_index` returned."""

    def __init__(self, datasets: Sequence[SampleDataset], index: Arrays) -> None:
        self.datasets = tuple(datasets)
        self.dataset_index, self.sample_index = index["dataset"], index["sample"]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.datasets[int(self.dataset_index[index])][int(self.sample_index[index])]

    @property
    def packing(self) -> Packing | None:
        """What an epoch of the datasets' samples holds, where these are padded."""
        drawn = np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()
        known = [of.packing if isinstance(of, KnowsPacking) else None for of in self.datasets]
        parts = [(of, count) for of, count in zip(known, drawn, strict=True) if of is not None]
        return mixed_packing(parts) if parts else None

    def documents_of(self, index: int) -> str:
        """The documents of sample `index` of the blend."""
        dataset = self.datasets[int(self.dataset_index[index])]
        return dataset.documents_of(int(self.sample_index[index])) if isinstance(dataset, KnowsDocuments) else "unknown"


class NamedSets:
    """Several datasets of as many samples each, one after the other: a loader reads them as one. `sets`: By name; the
    name of the validation data itself is empty."""

    def __init__(self, sets: Mapping[str, SampleDataset]) -> None:
        self.names, self.datasets = tuple(sets), tuple(sets.values())
        self._size = len(self.datasets[0])
        assert all(len(dataset) == self._size for dataset in self.datasets)

    def __len__(self) -> int:
        return self._size * len(self.datasets)

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, sample = divmod(index, self._size)
        return self.datasets[number][sample]
