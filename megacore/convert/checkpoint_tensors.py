"""The tensors of a megacore checkpoint, whole and one at a time, whatever layout saved it; and the writing of one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.files import describe, verify
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
from megacore.checkpoint.tensor_file import DTYPES, TensorWriter, read_rows
from megacore.checkpoint.tensor_header import StoredTensor, read_header
from megacore.config import Config
from megacore.config.bert import ResolvedBert
from megacore.config.dimensions import DIMENSIONS
from megacore.config.optimizers import EMA
from megacore.errors import CheckpointError
from megacore.progress import Progress

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


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
        kind = EMA.name if averaged else MODEL
        self._entries = self.manifest.tensors.get(kind, {}) | self.manifest.tensors.get(BUFFERS, {})
        files = {piece.file for entry in self._entries.values() for piece in entry.pieces}
        self._stored: dict[str, dict[str, StoredTensor]] = {}
        for name in sorted(files):
            if name not in self.manifest.files:
                raise CheckpointError(f"{self.directory / name} is not among the files of its manifest")
            verify(self.directory / name, self.manifest.files[name])
            self._stored[name] = read_header(self.directory / name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global name -> global shape of every tensor."""
        return {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        dtypes = {DTYPES[stored.dtype] for _, stored in self._pieces(name)}
        if len(dtypes) != 1:
            raise CheckpointError(f"{self.directory}: {name} is stored in several dtypes or not at all")
        return dtypes.pop()

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor, assembled from its pieces, in the stored or another dtype."""
        return self.read_rows(name, 0, self.shapes[name][0], dtype)

    def read_rows(self, name: str, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows [start, stop) of a tensor's first dimension; the same."""
        pieces = list(self._pieces(name))
        shape, wanted = self.shapes[name], dtype or self.dtype(name)
        if len(pieces) == 1 and pieces[0][1].shape == shape:
            return read_rows(pieces[0][1], start, stop, wanted)
        rows = torch.empty((stop - start, *shape[1:]), dtype=wanted)
        filled = 0
        for piece, stored in pieces:
            first, last = max(start, piece.start[0]), min(stop, piece.stop[0])
            if first >= last:
                continue
            part = read_rows(stored, first - piece.start[0], last - piece.start[0], wanted)
            inner = (slice(a, b) for a, b in zip(piece.start[1:], piece.stop[1:], strict=True))
            rows[(slice(first - start, last - start), *inner)] = part
            filled += part.numel()
        if filled != rows.numel():
            raise CheckpointError(f"{self.directory}: the pieces of {name} do not cover it")
        return rows

    def _pieces(self, name: str) -> Iterator[tuple[Piece, StoredTensor]]:
        for piece in self._entries[name].pieces:
            stored = self._stored[piece.file].get(name)
            if stored is None or list(stored.shape) != [b - a for a, b in zip(piece.start, piece.stop, strict=True)]:
                raise CheckpointError(f"{self.directory / piece.file}: {name} is missing, or not as the manifest says")
            yield piece, stored


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
            with TensorWriter(directory / name, entries) as writer:
                for _ in entries:
                    writer.write(*next(tensors))
                    progress.advance(1)
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
