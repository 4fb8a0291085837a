"""Safetensors files, read and written a tensor at a time, with plain reads: what was read once does not stay in memory,
as mapped pages do."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megacore.checkpoint.tensor_header import StoredTensor, header_of
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

Slices = Sequence[tuple[int, int]]  # [start, stop) of every dimension


def read_tensor(tensor: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor, converted on the way where another dtype is asked for."""
    return read_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1, dtype).view(tensor.shape)


def read_rows(tensor: StoredTensor, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows [start, stop) of the first dimension."""
    if tensor.packed is not None:
        unpacked = from_mxfp4(*(read_rows(one, start, stop) for one in tensor.packed))
        return unpacked if dtype is None else unpacked.to(dtype)
    stored = DTYPES[tensor.dtype]
    values = torch.empty((stop - start, *tensor.shape[1:]), dtype=dtype or stored)
    row = math.prod(tensor.shape[1:]) * stored.itemsize
    with tensor.file.open("rb") as file:
        file.seek(tensor.start + start * row)
        if values.dtype == stored:
            _read_into(file, _bytes(values), tensor)
            return values
        step = max(1, _CHUNK // max(row, 1))
        for first in range(0, stop - start, step):
            part = torch.empty((min(step, stop - start - first), *tensor.shape[1:]), dtype=stored)
            _read_into(file, _bytes(part), tensor)
            values[first : first + step] = part
    return values


# What four bits stand for: a sign, two bits of exponent and one of mantissa (OCP Microscaling Formats 1.0, section 5).
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_OF_BITS = torch.cat([_FP4, -_FP4]).to(torch.bfloat16)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a tensor in MXFP4, [E, c, r] bf16. `blocks`: [E, r, c / 32, 16] uint8, two numbers a byte, that of
    the lower bits first. `scales`: [E, r, c / 32] uint8, exponents of 2, of which 127 are taken off."""
    numbers = _OF_BITS[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()]
    exponents = scales.int()[..., None] - 127
    return torch.ldexp(numbers, exponents).to(torch.bfloat16).flatten(2).transpose(1, 2).contiguous()


def read_slice(tensor: StoredTensor, where: Slices, out: Tensor | None = None) -> Tensor:
    """A slice of a tensor; no other bytes are read. `out`: contiguous, of the slice's shape and the stored dtype; None:
    a new tensor."""
    assert tensor.packed is None
    sizes = [stop - start for start, stop in where]
    values = torch.empty(sizes, dtype=DTYPES[tensor.dtype]) if out is None else out
    assert values.dtype == DTYPES[tensor.dtype] and list(values.shape) == sizes and values.is_contiguous()
    if not values.numel():
        return values
    cut = [d for d, size in enumerate(sizes) if size != tensor.shape[d]]
    inner = cut[-1] if cut else 0  # from here on the bytes of one index of the dimensions before follow one another
    strides = [math.prod(tensor.shape[d + 1 :]) for d in range(len(sizes))]
    base = sum(start * stride for (start, _), stride in zip(where, strides, strict=True))
    memory, run = _bytes(values), math.prod(sizes[inner:]) * values.element_size()
    with tensor.file.open("rb", buffering=0) as file:
        for number, index in enumerate(itertools.product(*(range(size) for size in sizes[:inner]))):
            offset = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
            file.seek(tensor.start + offset * values.element_size())
            _read_into(file, memory[number * run : (number + 1) * run], tensor)
    return values


def _read_into(file: BinaryIO | FileIO, memory: memoryview, tensor: StoredTensor) -> None:
    while memory:
        count = file.readinto(memory)  # type: ignore[union-attr]
        if not count:
            raise CheckpointError(f"{tensor.file} ends within {tensor.name}: it has become shorter")
        memory = memory[count:]


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_file(
    path: Path,
    types: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterator[tuple[str, Tensor]],
    on_written: Callable[[], None] = lambda: None,
) -> None:
    """Write a safetensors file, durably, from tensors as they come: those of `types`, of its dtypes and shapes and in
    its order. `on_written`: called after each."""
    with path.open("xb") as file:
        file.write(header_of({name: (NAMES[dtype], shape) for name, (dtype, shape) in types.items()}))
        for expected, (dtype, shape) in types.items():
            name, tensor = next(tensors)
            assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, shape), "tensors come as announced"
            file.write(_bytes(tensor.contiguous()))
            on_written()
        file.flush()
        os.fsync(file.fileno())
