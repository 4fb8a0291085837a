"""The small JSON beside a dataset: how many tokens it holds, and which tokenizer made them.

Megatron-LM's format knows neither the tokenizer nor the largest id; `P.json` beside `P.bin` does. A sidecar is believed
only while it is at least as new as both files and records their exact lengths; otherwise the dataset is simply treated
as one without a sidecar. It holds no times or paths, so equal inputs give equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from megacore.data.indexed.reader import IndexedDataset
from megacore.files import read_bounded

_FORMAT = "megacore-dataset-1"
_MOST_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar:
    """What is known about a dataset beyond its .idx.

    Attributes:
        tokenizer_fingerprint: of the tokenizer's file.
        tokenizer_ids: of the tokenizer's ids (`ids_fingerprint`); None in sidecars of earlier versions.
    """

    documents: int
    sequences: int
    tokens: int
    dtype: str
    max_token_id: int
    vocab_size: int
    tokenizer_fingerprint: str
    eod: int | None
    append_eod: bool
    bin_bytes: int
    idx_bytes: int
    tokenizer_ids: str | None = None

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
        """The file's content."""
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
        values = json.loads(read_bounded(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _LOG.warning("%s: ignored, not readable as JSON (%s)", path, error)
        return None
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        return None
    sidecar = _from_values(values)
    if sidecar is None:
        _LOG.warning("%s: ignored, its fields are not those of a sidecar", path)
        return None
    files = dataset.bin_path.stat(), dataset.idx_path.stat()
    matches = (sidecar.bin_bytes, sidecar.idx_bytes) == (files[0].st_size, files[1].st_size)
    if not matches or written < max(file.st_mtime_ns for file in files):
        _LOG.warning("%s: ignored, it is older than the dataset or describes another one", path)
        return None
    return sidecar


def _from_values(values: dict[str, object]) -> Sidecar | None:
    """A sidecar of exactly its fields, each of its type."""
    types = typing.get_type_hints(Sidecar)
    values = {"tokenizer_ids": None, **values}
    if values.keys() != types.keys() or not all(isinstance(values[name], kind) for name, kind in types.items()):
        return None
    return Sidecar(**values)  # type: ignore[arg-type]
