"""Checkpoints of torch.distributed.checkpoint (DCP): an index, .metadata, and files with the pieces of each tensor. Any
ranks may have written it, with any way of dividing tensors: the index says which elements each piece has. It is a
pickle of classes of torch's, of which only the fields are read here (pickled.py)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from megacore.convert.hf_directory import inside
from megacore.convert.pickled import NAMES, Inert, Record, load_tensor, unpickle
from megacore.errors import CheckpointError

INDEX = ".metadata"
_MOST_PIECES = 1 << 22
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_METADATA = "torch.distributed.checkpoint.metadata"


class _Tensor(Record):
    """The index of a tensor."""


class _Key(Record):
    """The name of a tensor's piece, and where it begins."""


KNOWN: Mapping[str, Any] = {
    **dict.fromkeys(NAMES["dcp_records"], Record),
    **dict.fromkeys(NAMES["dcp_unneeded"], Inert),
    f"{_METADATA}.TensorStorageMetadata": _Tensor,
    f"{_METADATA}.MetadataIndex": _Key,
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    **{f"torch.{name}": getattr(torch, name) for name in _DTYPES if hasattr(torch, name)},
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where a piece of a tensor lies."""

    start: tuple[int, ...]  # its first element in each dimension
    shape: tuple[int, ...]
    file: Path
    offset: int  # offset, length: its bytes in the file
    length: int


@dataclass(frozen=True, kw_only=True)
class TensorInPieces:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)

    def read(self) -> Tensor:
        """The whole tensor. Raises CheckpointError where a piece is damaged, or the pieces do not cover the tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        filled = 0
        for piece in self.pieces:
            with piece.file.open("rb") as file:
                file.seek(piece.offset)
                part = load_tensor(file.read(piece.length), f"{piece.file}: a piece of {self.name}")
            if part.numel() != math.prod(piece.shape) or part.dtype != self.dtype:
                raise CheckpointError(f"{piece.file}: a piece of {self.name} is not as the index says")
            window = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
            if whole[window].shape != piece.shape:
                raise CheckpointError(f"{piece.file}: a piece of {self.name} reaches beyond the tensor")
            whole[window] = part.view(piece.shape)
            filled += part.numel()
        if filled != whole.numel():
            raise CheckpointError(f"the pieces of {self.name} have {filled} elements, and the tensor {whole.numel()}")
        return whole


def open_dcp(directory: Path) -> dict[str, TensorInPieces]:
    """The tensors of a checkpoint by name; none is read. Raises CheckpointError where the index is missing or damaged,
    holds what megacore does not load, or contradicts the files."""
    index = inside(directory, INDEX)
    root = unpickle(index, KNOWN)
    if not isinstance(root, Record):
        raise CheckpointError(f"{index} is not the index of a checkpoint")
    try:
        return _tensors(root.fields, directory)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}"[:300]) from None


def _tensors(fields: Mapping[str, Any], directory: Path) -> dict[str, TensorInPieces]:
    stored = {
        name: TensorInPieces(name=name, shape=_sizes(entry.fields["size"]), dtype=_dtype(entry))
        for name, entry in fields["state_dict_metadata"].items()
        if isinstance(entry, _Tensor)
    }
    sizes: dict[Path, int] = {}
    shapes = {
        (name, _sizes(chunk.fields["offsets"])): _sizes(chunk.fields["sizes"])
        for name in stored
        for chunk in fields["state_dict_metadata"][name].fields["chunks"]
    }
    if len(shapes) > _MOST_PIECES:
        raise ValueError("it has too many pieces")
    for key, where in fields["storage_data"].items():
        name = key.fields["fqn"]
        if name not in stored:
            continue
        start = _sizes(key.fields.get("offset") or (0,) * len(stored[name].shape))
        info = where.fields
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{directory}: {name} is stored compressed or encrypted, which megacore does not read"
            )
        file = inside(directory, info["relative_path"])
        size = sizes.setdefault(file, file.stat().st_size)
        if not (info["offset"] >= 0 and 0 < info["length"] <= size - info["offset"]):
            raise CheckpointError(f"{file} has {size:,} bytes, fewer than the index says")
        shape = shapes.pop((name, start))
        stored[name].pieces.append(
            Piece(start=start, shape=shape, file=file, offset=info["offset"], length=info["length"])
        )
    for name, start in shapes:
        raise CheckpointError(f"{directory}: the piece of {name} that begins at {list(start)} is in no file")
    for tensor in stored.values():
        held = sum(piece.length for piece in tensor.pieces)
        if math.prod(tensor.shape) * tensor.dtype.itemsize > held:
            raise CheckpointError(f"{directory}: {tensor.name} would take more bytes than the files have")
    return stored


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise TypeError(f"{value!r} are no sizes")
    return tuple(value)


def _dtype(entry: Record) -> torch.dtype:
    state = entry.fields["properties"].fields
    values = state.get("state", list(state.values()))
    found = next((value for value in values if isinstance(value, torch.dtype)), None)
    if found is None:
        raise TypeError("a tensor has no dtype")
    return found


def write_dcp(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that `torch.distributed.checkpoint.load` reads on any number of ranks. `directory`: to create
    the files in."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is one process
        save(dict(tensors), storage_writer=FileSystemWriter(directory), no_dist=True)
