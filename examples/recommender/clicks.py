"""Advertisements and whether they were clicked, in the shape of Criteo's data: 13 counts, 26 categories, one label.

The reader takes Criteo's files (a line: label, 13 integers, 26 hexadecimal words, between tabs; any may be empty). The
generator makes up data of that shape, in which clicks depend on single categories and on pairs of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megacore.errors import DataError

COUNTS, FIELDS = 13, 26
# Fields with few values, in Criteo's data and here: their tables are copied to every rank.
SMALL_FIELDS = (5, 8, 13, 16, 19, 21, 22)
LARGE_FIELDS = tuple(field for field in range(FIELDS) if field not in SMALL_FIELDS)
_SIZES = [20 if field in SMALL_FIELDS else 200 * 2 ** (field % 6) for field in range(FIELDS)]
_MISSING = 2**32
_FIELD_BITS = 40  # an id is its field's number, shifted by so many bits, plus its value


@dataclass(frozen=True)
class Clicks:
    """Some samples.

    Attributes:
        labels: [n] fp32, 1 where it was clicked.
        counts: [n, COUNTS] fp32, logarithms.
        ids: [n, FIELDS] int64, unique over all fields.
    """

    labels: Tensor
    counts: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, number: int, parts: int) -> Clicks:
        """One of so many equal parts."""
        return Clicks(*(tensor.chunk(parts)[number] for tensor in (self.labels, self.counts, self.ids)))


def mixed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """64 well mixed bits of every number: a step of SplitMix64 (Steele, Lea and Flood 2014). Any shape, uint64."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform(numbers: np.ndarray, seed: int) -> np.ndarray:
    """A random number in [-1, 1) for every number, always the same, fp64."""
    return (mixed(numbers, seed) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def generated(number: int, count: int) -> Clicks:
    """A batch that depends on its number only."""
    draw = np.random.default_rng(number)
    values = (draw.random((count, FIELDS)) ** 3 * _SIZES).astype(np.int64)  # few values are frequent, many are rare
    ids = values + (np.arange(FIELDS) << _FIELD_BITS)
    counts = draw.standard_normal((count, COUNTS))
    pairs = ids[:, :-1] * 1_000_003 + ids[:, 1:]
    score = uniform(ids, 1).sum(1) * 0.6 + uniform(pairs[:, SMALL_FIELDS], 2).sum(1) * 0.4 + counts[:, 0] - 0.5
    clicked = draw.random(count) < 1 / (1 + np.exp(-score))
    return Clicks(torch.from_numpy(clicked).float(), torch.from_numpy(counts).float(), torch.from_numpy(ids))


def read(path: Path, size: int) -> Iterator[Clicks]:
    """Full batches of a file in Criteo's format; what is left at its end is dropped.

    Raises:
        DataError: the file cannot be read, a line has another number of columns, or a column is no number.
    """
    try:
        opened = path.open(encoding="ascii", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: give a file in Criteo's format") from error
    with opened as file:
        number = 0
        while len(lines := list(islice(file, size))) == size:
            rows = [_parsed(line, f"{path}, line {number + i + 1}") for i, line in enumerate(lines)]
            labels, counts, ids = (torch.tensor(column) for column in zip(*rows, strict=True))
            yield Clicks(labels, counts.clamp_min(0).log1p(), ids)
            number += size


def _parsed(line: str, where: str) -> tuple[float, list[float], list[int]]:
    columns = line.rstrip("\n").split("\t")
    if len(columns) != 1 + COUNTS + FIELDS:
        raise DataError(
            f"{where} has {len(columns)} columns, but a line of Criteo's has {1 + COUNTS + FIELDS}: a label, {COUNTS} "
            f"integers and {FIELDS} hexadecimal words between tabs; is it another file?"
        )
    try:
        counts = [float(word or 0) for word in columns[1 : 1 + COUNTS]]
        values = [int(word, 16) if word else _MISSING for word in columns[1 + COUNTS :]]
        return float(columns[0]), counts, [value + (field << _FIELD_BITS) for field, value in enumerate(values)]
    except ValueError as error:
        raise DataError(f"{where}: {error}; counts are integers, categories hexadecimal") from error
