"""What lies beside a dataset `P.bin` and `P.idx`: a small JSON, and perhaps a loss mask.

`P.json` says how many tokens it holds, and which tokenizer made them. It is believed only while it is at least as new
as both files and records their exact lengths. `P_loss_mask.bin` and `.idx` are an ordinary dataset of uint8 with the
sequences and documents of P: 1 where a token is predicted, else 0. A dataset without them is predicted whole.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megacore.data.indexed.reader import DTYPES, IndexedDataset, bin_path, idx_path
from megacore.errors import DataError
from megacore.safe_json import read_json

_FORMAT = "megacore-dataset-1"
_MOST_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)
MASK_DTYPE: np.dtype = DTYPES[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar:
    """What is known about a dataset beyond its .idx."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    max_token_id: int
    vocab_size: int
    tokenizer_fingerprint: str  # of the tokenizer's file
    eod: int | None
    append_eod: bool
    bin_bytes: int
    idx_bytes: int
    tokenizer_ids: str | None = None  # of the tokenizer's ids (`ids_fingerprint`); None in sidecars of earlier versions

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        """The sidecar of a concatenation."""
        first = parts[0]
        documents = sum(part.documents for part in parts)
        sequences = sum(part.sequences for part in parts)
        return dataclasses.replace(
            first,
            documents=documents,
            sequences=sequences,
            tokens=sum(part.tokens for part in parts),
            max_token_id=max(part.max_token_id for part in parts),
            append_eod=all(part.append_eod for part in parts),
            bin_bytes=sum(part.bin_bytes for part in parts),
            idx_bytes=idx_bytes(sequences, documents),
        )

    def to_bytes(self) -> bytes:
        # No times and no paths in it: equal inputs give equal bytes.
        return (json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n").encode()


def idx_bytes(sequences: int, documents: int) -> int:
    """Length of an .idx file."""
    return 34 + 12 * sequences + 8 * (documents + 1)


def sidecar_path(prefix: str | Path) -> Path:
    """Path of the sidecar of a dataset prefix."""
    return Path(f"{prefix}.json")


def read_sidecar(dataset: IndexedDataset) -> Sidecar | None:
    """The sidecar of a dataset, or None where there is none that can be believed."""
    path = sidecar_path(dataset.prefix)
    try:
        written = path.stat().st_mtime_ns
        values = read_json(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _LOG.warning("%s: ignored, not readable as JSON (%s)", path, error)
        return None
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        return None
    types, values = typing.get_type_hints(Sidecar), {"tokenizer_ids": None, **values}
    if values.keys() != types.keys() or not all(isinstance(values[name], kind) for name, kind in types.items()):
        _LOG.warning("%s: ignored, its fields are not those of a sidecar", path)
        return None
    sidecar = Sidecar(**values)
    files = dataset.bin_path.stat(), dataset.idx_path.stat()
    matches = (sidecar.bin_bytes, sidecar.idx_bytes) == (files[0].st_size, files[1].st_size)
    # Other programs rewrite a dataset and leave the old note beside it.
    if not matches or written < max(file.st_mtime_ns for file in files):
        _LOG.warning("%s: ignored, it is older than the dataset or describes another one", path)
        return None
    return sidecar


def loss_mask_prefix(prefix: str | Path) -> str:
    """Prefix of the loss mask of a dataset prefix."""
    return f"{prefix}_loss_mask"


def open_loss_mask(dataset: IndexedDataset) -> IndexedDataset | None:
    """The loss mask of a dataset; None where it has none. Raises DataError where the mask is damaged, or of another
    dataset."""
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
    """The values of a loss mask for the tokens [start, stop). Raises DataError where one is neither 0 nor 1."""
    values: NDArray[np.uint8] = mask.tokens(start, stop)
    if len(values) and values.max() > 1:
        at = int(np.argmax(values > 1))
        raise DataError(
            f"{mask.bin_path} has the value {values[at]} for token {start + at}, and a loss mask has 0 and 1 only: "
            f"preprocess the dataset again, or remove {mask.prefix}.bin and .idx to predict every token"
        )
    return values
