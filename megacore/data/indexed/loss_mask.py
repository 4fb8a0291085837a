"""Which tokens of a dataset a model is to predict: `P_loss_mask.bin` and `.idx` beside `P.bin` and `P.idx`.

The files are an ordinary dataset of uint8 with the sequences and documents of P: 1 where the token is predicted, else
0. A dataset without them is predicted whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megacore.data.indexed.reader import DTYPES, IndexedDataset, bin_path, idx_path
from megacore.errors import DataError

MASK_DTYPE: np.dtype = DTYPES[1]


def loss_mask_prefix(prefix: str | Path) -> str:
    """Prefix of the loss mask of a dataset prefix."""
    return f"{prefix}_loss_mask"


def open_loss_mask(dataset: IndexedDataset) -> IndexedDataset | None:
    """The loss mask of a dataset; None where it has none.

    Raises:
        DataError: The mask is damaged, or of another dataset.
    """
    prefix = loss_mask_prefix(dataset.prefix)
    if not idx_path(prefix).exists() and not bin_path(prefix).exists():
        return None
    mask = IndexedDataset(prefix)
    same = np.array_equal(mask.sequence_lengths, dataset.sequence_lengths) and np.array_equal(
        mask.document_indices, dataset.document_indices
    )
    if mask.dtype != MASK_DTYPE or not same:
        raise DataError(
            f"{mask.idx_path} is not the loss mask of {dataset.idx_path}: it has other sequences, or is not of "
            f"{MASK_DTYPE.name}: preprocess the dataset again, or remove {prefix}.bin and .idx to predict every token"
        )
    return mask


def is_predicted(mask: IndexedDataset, start: int, stop: int) -> NDArray[np.uint8]:
    """The values of a loss mask for the tokens [start, stop).

    Raises:
        DataError: One is neither 0 nor 1.
    """
    values: NDArray[np.uint8] = mask.tokens(start, stop)
    if len(values) and values.max() > 1:
        at = int(np.argmax(values > 1))
        raise DataError(
            f"{mask.bin_path} has the value {values[at]} for token {start + at}, and a loss mask has 0 and 1 only: "
            f"preprocess the dataset again, or remove {mask.prefix}.bin and .idx to predict every token"
        )
    return values
