"""The tensors of a megacore checkpoint, whole and one at a time, whatever layout saved it; and the writing of one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.files import describe, verify
from megacore.checkpoint.load import Reader, check_header
from megacore.checkpoint.manifest import (
    Manifest,
    Piece,
    TensorEntry,
    find_checkpoint,
    read_manifest,
    section_of,
    sections_as_dicts,
    trained_model,
)
from megacore.checkpoint.state import BUFFERS, MODEL
from megacore.checkpoint.tensor_file import write_file
from megacore.config import Config
from megacore.config.bert import ResolvedBert
from megacore.config.dimensions import DIMENSIONS
from megacore.config.optimizers import EMA
from megacore.errors import CheckpointError
from megacore.progress import Progress

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape
_CHUNK = 1 << 22  # bytes that are read at a time


class CheckpointTensors:
    """The weights of a checkpoint or a run's newest, or with `averaged` their average (--ema-decay), verified before
    they are read. Raises CheckpointError where a file is damaged, the manifest does not describe a model, or there is
    no average."""

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        self.directory = find_checkpoint(path)
        self.manifest = read_manifest(self.directory)
        self.config = trained_model(self.manifest, self.directory)  # the model that it is of, resolved
        paired = "bert" in self.manifest.config
        # Its BERT section; None: it predicts the next token.
        self.bert = section_of(self.manifest, self.directory, "bert", ResolvedBert) if paired else None
        if averaged and EMA.name not in self.manifest.tensors:
            raise CheckpointError(
                f"{self.directory} has no average of the weights: leave out --ema, or use a checkpoint of a run with "
                "--ema-decay"
            )
        self._kind = EMA.name if averaged else MODEL
        self._buffers = self.manifest.tensors.get(BUFFERS, {})
        self._entries = self.manifest.tensors.get(self._kind, {}) | self._buffers
        for name in sorted(self.manifest.files_of([self._kind, BUFFERS])):
            verify(self.directory / name, self.manifest.files[name])
            check_header(self.directory / name, self.manifest)
        self._reader = Reader(self.directory, self.manifest)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global name -> global shape of every tensor."""
        return {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._entries[name].dtype)
        return found

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor, assembled from its pieces, in the stored or another dtype."""
        return self.read_rows(name, 0, self.shapes[name][0], dtype)

    def read_rows(self, name: str, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows [start, stop) of a tensor's first dimension; the same."""
        kind = BUFFERS if name in self._buffers else self._kind
        sizes = self.shapes[name][1:]
        rows = torch.empty((stop - start, *sizes), dtype=dtype or self.dtype(name))
        # A part at a time: where the dtype is another one, the stored values are there beside the whole.
        step = max(1, _CHUNK // max(math.prod(sizes) * self.dtype(name).itemsize, 1))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            wanted = ((first, last), *((0, size) for size in sizes))
            self._reader.read(kind, name, wanted, rows[first - start : last - start])
        return rows


# ---- writing ---------------------------------------------------------------------------------------------------------


def shards(types_of: TensorTypes, most_bytes: int) -> list[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Assign tensors to files of at most `max_bytes`, in order; a larger tensor gets a separate file."""
    files: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (dtype, shape) in types_of.items():
        more = torch.Size(shape).numel() * dtype.itemsize
        if files[-1] and size + more > most_bytes:
            files.append({})
            size = 0
        files[-1][name] = (dtype, shape)
        size += more
    return files


def write_shards(
    directory: Path, stem: str, types_of: TensorTypes, tensors: Iterator[tuple[str, Tensor]], *, most_bytes: int
) -> dict[str, str]:
    """Write tensors, in the order of `types_of`, into model.safetensors, or model-00001-of-00003.safetensors for the
    `stem` model; the file of each tensor."""
    files = shards(types_of, most_bytes)
    file_of: dict[str, str] = {}
    with Progress("converting", len(types_of), unit="tensors") as progress:
        for number, entries in enumerate(files, start=1):
            name = f"{stem}.safetensors" if len(files) == 1 else f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            write_file(directory / name, entries, tensors, partial(progress.advance, 1))
            file_of |= dict.fromkeys(entries, name)
    return file_of


def write_weights(
    directory: Path,
    config: Config,
    types_of: TensorTypes,
    tensors: Iterator[tuple[str, Tensor]],
    *,
    most_bytes: int,
    others: Sequence[str] = (),
    tokenizer: str | None = None,
    buffers: Collection[str] = (),
) -> None:
    """Write a checkpoint with only weights, at step 0, from which a run starts. `types_of`: of all tensors, in the
    order in which they come. `others`: further files, to list in the manifest. `tokenizer`: fingerprint of the one
    among them. `buffers`: names of tensors that are no weights."""
    where = write_shards(directory, "model", types_of, tensors, most_bytes=most_bytes)
    entries = {
        name: TensorEntry(
            shape=list(shape),
            dtype=str(dtype).removeprefix("torch."),
            pieces=[Piece(file=where[name], start=[0] * len(shape), stop=list(shape))],
        )
        for name, (dtype, shape) in types_of.items()
    }
    manifest = Manifest(
        step=0,
        consumed_samples=0,
        counters={"updates": 0},
        topology=dict.fromkeys((dimension.name for dimension in DIMENSIONS), 1),
        tokenizer=tokenizer,
        config=sections_as_dicts(config),
        files={name: describe(directory / name) for name in sorted({*where.values(), *others})},
        tensors={
            MODEL: {name: entry for name, entry in entries.items() if name not in buffers},
            **({BUFFERS: {name: entries[name] for name in buffers}} if buffers else {}),
        },
    )
    (directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
