"""CIFAR-10 from its binary files (Krizhevsky 2009), or made-up images of the same shape.

A record of the files (`data_batch_1.bin` ... `data_batch_5.bin`, `test_batch.bin`) is a byte for the label and 3 x 32 x
32 bytes for the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megacore.errors import DataError

CLASSES, SHAPE = 10, (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_MEAN, _STD = 0.473, 0.251  # of CIFAR-10's pixels, where 1 is white
_TEST_SEED = 10**6


@dataclass(frozen=True)
class Images:
    """Images [n, 3, 32, 32] fp32 with mean 0 and variance 1, and labels [n]."""

    pixels: Tensor
    labels: Tensor

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """A batch of training: the images of an epoch in random order, each mirrored or not. It depends on the step
        only, so every rank and every layout sees the same."""
        per_epoch = max(1, len(self.labels) // size)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(epoch))
        rows = order[place * size : (place + 1) * size]
        mirrored = torch.rand(len(rows), generator=torch.Generator().manual_seed(step)) < 0.5
        pixels = self.pixels[rows]
        return torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(3), pixels), self.labels[rows]


def load(directory: Path | None) -> tuple[Images, Images]:
    """Images to learn from, and others to test with; None: made up.

    Raises:
        DataError: a file is missing, or is no file of CIFAR-10's binary version.
    """
    if directory is None:
        return made_up(2048, seed=0), made_up(512, seed=_TEST_SEED)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    parts = [_read(directory / name) for name in names]
    pixels = torch.cat([part.pixels for part in parts])
    return Images(pixels, torch.cat([part.labels for part in parts])), _read(directory / "test_batch.bin")


def made_up(count: int, seed: int) -> Images:
    """Each class is a symmetric pattern, under noise."""
    patterns = torch.randn(CLASSES, *SHAPE, generator=torch.Generator().manual_seed(1))
    patterns = (patterns + patterns.flip(3)) / 2**0.5
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=draw)
    return Images((patterns[labels] + 2 * torch.randn(count, *SHAPE, generator=draw)) / 5**0.5, labels)


def _read(path: Path) -> Images:
    if not path.exists():
        raise DataError(f"{path} does not exist: --data is the directory of CIFAR-10's binary version (*.bin)")
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) == 0 or len(data) % _RECORD:
        raise DataError(f"{path} has {len(data)} bytes, which are not records of {_RECORD}: it is not CIFAR-10's")
    records = data.reshape(-1, _RECORD)
    if records[:, 0].max() >= CLASSES:
        raise DataError(f"{path} has label {records[:, 0].max()}: CIFAR-10 has 0 to 9; is it CIFAR-100?")
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE).astype(np.float32))
    return Images((pixels / 255 - _MEAN) / _STD, torch.from_numpy(records[:, 0].astype(np.int64)))
