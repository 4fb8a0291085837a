"""The header of a safetensors file: written, and checked whole before a byte of a tensor is read. The format (8 bytes
of header length, a JSON header, then the tensors' bytes) is simple enough: names, types and shapes must be possible,
and the tensors must tile the rest of the file. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.errors import CheckpointError
from megacore.remote import Location
from megacore.safe_json import parse_object

# Bytes of an element by the format's names.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LARGEST_HEADER = 1 << 20  # bytes: about 8,000 tensors, several times what the largest models have
_LARGEST = 1 << 48  # bytes of a tensor: more would overflow what is computed with it
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies."""

    file: Location
    name: str
    dtype: str  # of its elements, by the format's name
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file
    # Of a tensor of experts in MXFP4, [E, c, r], which is read as bf16: blocks [E, r, c / 32, 16], two numbers a byte,
    # and the exponent of each block's scale, [E, r, c / 32]. None: it lies as it is.
    packed: tuple[StoredTensor, StoredTensor] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What a safetensors file begins with: its header's length and the header. `tensors`: name -> dtype, by the
    format's name, and shape, in the order in which their bytes follow."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # So that tensors begin at multiples of 8 bytes, as the library writes them.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Location, *, largest: int = _LARGEST_HEADER) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name; `largest`: bytes that the header may have. Raises CheckpointError
    where the file is not safetensors, or its header says what cannot be."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, largest):
                raise CheckpointError(f"{path} is not safetensors: its header would have {length:,} bytes")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    header = parse_object(data, f"the header of {path}")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    # By size too: an empty tensor begins where the next one does.
    for tensor in sorted(tensors.values(), key=lambda one: (one.start, one.bytes)):
        if tensor.start != end:
            what = "overlaps another tensor" if tensor.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: {tensor.name[:80]} {what}")
        end = tensor.start + tensor.bytes
    if end != size:
        raise CheckpointError(f"{path} has {size:,} bytes, but its tensors end at {end:,}: it is damaged")
    return tensors


def _entry(path: Location, name: str, entry: Any, base: int) -> StoredTensor:
    where = f"{path}: {name[:80]}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} does not have a dtype, a shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has the dtype {str(dtype)[:20]!r}, which megacore does not read")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_counts(shape) and len(shape) <= _MOST_DIMENSIONS and _counts(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{where} has a shape or data_offsets that are no lists of counts")
    tensor = StoredTensor(file=path, name=name, dtype=dtype, shape=tuple(shape), start=base + offsets[0])
    if tensor.bytes > _LARGEST or offsets[1] - offsets[0] != tensor.bytes:
        raise CheckpointError(f"{where} has data_offsets {offsets}, which do not fit its shape {shape}")
    return tensor


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _LARGEST for value in values)
