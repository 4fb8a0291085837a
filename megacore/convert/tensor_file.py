"""Safetensors files, read and written a tensor at a time.

Files are read with plain reads, not mapped: what was read once does not stay in this process's memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import BufferedReader, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megacore.convert.tensor_header import StoredTensor
from megacore.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 22  # bytes converted to another dtype at a time: they are there beside the whole tensor


def read_tensor(tensor: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor, converted on the way where another dtype is asked for."""
    return read_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1, dtype).view(tensor.shape)


def read_rows(tensor: StoredTensor, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows [start, stop) of the first dimension."""
    stored = DTYPES[tensor.dtype]
    values = torch.empty((stop - start, *tensor.shape[1:]), dtype=dtype or stored)
    row = math.prod(tensor.shape[1:]) * stored.itemsize
    with tensor.file.open("rb") as file:
        file.seek(tensor.start + start * row)
        if values.dtype == stored:
            _read_into(file, values, tensor)
            return values
        step = max(1, _CHUNK // max(row, 1))
        for first in range(0, stop - start, step):
            part = torch.empty((min(step, stop - start - first), *tensor.shape[1:]), dtype=stored)
            _read_into(file, part, tensor)
            values[first : first + step] = part
    return values


def read_block(tensor: StoredTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Rows and columns of a matrix; of the rows nothing is read but these columns."""
    (first, last), (left, right) = rows, columns
    if (left, right) == (0, tensor.shape[1]):
        return read_rows(tensor, first, last)
    values = torch.empty((last - first, right - left), dtype=DTYPES[tensor.dtype])
    row = tensor.shape[1] * values.element_size()
    with tensor.file.open("rb", buffering=0) as file:
        for number in range(last - first):
            file.seek(tensor.start + (first + number) * row + left * values.element_size())
            _read_into(file, values[number], tensor)
    return values


def _read_into(file: BufferedReader | FileIO, values: Tensor, tensor: StoredTensor) -> None:
    view = _bytes(values)
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{tensor.file} ends within {tensor.name}: it has become shorter")
        view = view[count:]


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class TensorWriter:
    """Writes a safetensors file, tensor by tensor in the announced order.

    Args:
        path: the new file.
        tensors: name -> dtype and shape, of all that will be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        self._waiting = list(tensors.items())
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-len(data) % 8)
        self._file = path.open("xb")
        self._file.write(len(data).to_bytes(8, "little") + data)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        expected, (dtype, shape) = self._waiting.pop(0)
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, shape), "tensors come as announced"
        self._file.write(_bytes(tensor.contiguous()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._waiting, "every announced tensor is written"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
