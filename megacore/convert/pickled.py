"""Reads the pickles of other trainers' checkpoints without running what they say, and writes such files.

`load` takes what torch's restricted loader does, of files of torch.save; `unpickle` takes a plain pickle, the index of
torch.distributed.checkpoint. An inert class stands for each name that such files mention and nobody here needs, so that
none of their code runs. Before anything is built, a pickle's commands are followed with sizes in place of values.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import tomllib
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from megacore.errors import CheckpointError
from megacore.files import read_bounded

NAMES = {
    program: names.split()
    for program, names in tomllib.loads(Path(__file__).with_name("pickles.toml").read_text(encoding="utf-8")).items()
}
"""Classes and functions that pickles of other programs mention, of pickles.toml."""
_MOST_INDEX = 1 << 30
_LONGEST_LINE = 1 << 20  # lines have names and numbers
_DEEPEST = 100  # containers within containers; checkpoints of other trainers have about ten
_MOST_PER_BYTE = 8  # values that are read again or copied, for each byte; checkpoints have fewer than one
_FEW = 4096  # of them are always allowed
_MOST_WAITING = 50_000  # values that nothing holds yet: the longest tuple, nearly
_MOST_VIEWS = 4  # of each byte: tied weights are in the file once, and in its tables twice
_TEXT = 16  # characters or bytes that count as one value
_PICKLES_OF_OLD_FILES = 5  # one after the other: of torch.save before version 1.6
_NEVER_WRITTEN = ("DUP", "LONG4", "EXT1", "EXT2", "EXT4")  # commands that no checkpoint needs
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"), ("BINGET", "LONG_BINGET", "GET")
_FILLING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_CALLING = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BUILD")


class Inert:
    """Stands in for what is not needed: takes anything, keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class Record:
    """Stands in for an object of which only the fields are needed; `fields` has them."""

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # of a class with slots
            state = {**(state[0] or {}), **state[1]}
        self.fields = state if isinstance(state, dict) else {"state": state}


def load(path: Path, *, deepspeed: bool = False) -> Any:
    """What torch.save wrote, with argparse.Namespace, in which Megatron-LM keeps its flags, and with `deepspeed`
    DeepSpeed's names of pickles.toml; tensors are read when they are used, where the file's form allows it. Raises
    CheckpointError where it mentions anything else, or is damaged."""
    unneeded = NAMES["megatron"] + (NAMES["deepspeed"] if deepspeed else [])
    known: list[Any] = [argparse.Namespace, *((Inert, name) for name in unneeded)]
    try:
        with torch.serialization.safe_globals(known), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own; a refusal says what matters
            value = _read(path)
            _require_plain(list(_tensors_in(value)), path.stat().st_size)
            return value
    except Exception as error:  # damaged bytes raise whatever the loader stumbles over
        reason = str(error).replace("Please use", "torch would let you use").strip().splitlines()
        # torch advises to execute the file.
        reason = [line for line in reason if "weights_only" not in line] or ["it is no file of torch.save"]
        cause = next((line for line in reason if "GLOBAL" in line or "global" in line), reason[0])
        raise CheckpointError(
            f"{path} holds more than tensors and flags, or is damaged, and was not loaded: {cause.strip()[:200]}"
        ) from None


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        if zipped:
            _require_stored(file, path.stat().st_size)
        else:
            for _ in range(_PICKLES_OF_OLD_FILES):
                _require_modest(file)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | argparse.Namespace):
        held = vars(value) if isinstance(value, argparse.Namespace) else value
        for inner in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors_in(inner)


def _require_plain(tensors: list[Tensor], size: int) -> None:
    """Refuse tensors whose numbers are not in the file, each once or a few times."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            form = "no numbers" if tensor.is_meta else f"the layout {tensor.layout} or quantized numbers"
            raise ValueError(f"a tensor of shape {list(tensor.shape)} has {form}, which megacore does not read")
    held = sum(tensor.nbytes for tensor in tensors)
    if held > _MOST_VIEWS * size:  # views of few stored numbers, which a copy would spread out
        raise ValueError(f"it has {size:,} bytes, but its tensors would take {held:,}")


def _require_stored(file: BinaryIO, size: int) -> None:
    """Refuse an archive of torch.save's that takes much more than its own size to read."""
    entries = zipfile.ZipFile(file).infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its archive is compressed, which torch.save does not do")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("the parts of its archive are larger than the file")
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)  # the reader of torch.load: another may find another pickle
    if reader.get_record_size("data.pkl") > _MOST_INDEX:
        raise ValueError(f"its pickle has more than {_MOST_INDEX:,} bytes")
    _require_modest(io.BytesIO(reader.get_record("data.pkl")))


@dataclass(slots=True)
class _Size:
    """Of a value that a pickle describes."""

    values: int  # in it, itself included; what is there several times counts as often
    depth: int = 0  # of containers within each other
    is_open: bool = False  # whether it may still grow: nothing holds it yet

    def hold(self, inner: list[_Size]) -> None:
        for value in inner:
            self.values += value.values
            self.depth = max(self.depth, value.depth + 1)
            value.is_open = False
        if self.depth > _DEEPEST:
            raise ValueError(f"its containers are nested too deep: more than {_DEEPEST}")


class _Bounded:
    """A pickle's file for pickletools: a text that is too long, such as one in a sparse file, is refused unread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._end, self.tell = file, file.tell() + _MOST_INDEX, file.tell

    def read(self, size: int) -> bytes:
        if self.tell() + size > self._end:
            raise ValueError(f"its pickle has more than {_MOST_INDEX:,} bytes")
        return self._file.read(size)

    def readline(self) -> bytes:
        line = self._file.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"its pickle has a line of more than {_LONGEST_LINE:,} bytes")
        return line


def _require_modest(file: BinaryIO) -> None:
    """Refuse a pickle that takes much more than its own size to build, to hash or to walk through. `file`: at the
    pickle's beginning; afterwards at its end. Raises ValueError where it would, or it is damaged."""
    # A few bytes can describe a value that is walked for ever, or nested too deep for the interpreter's stack.
    stack, marks, memo = list[_Size](), list[int](), dict[int, _Size]()
    single, again, start = _Size(1), 0, file.tell()
    for command, argument, place in pickletools.genops(cast(BinaryIO, _Bounded(file))):
        name, length = command.name, (place or 0) - start
        if name in _PUTS:
            number = len(memo) if argument is None else argument
            if number > length:  # the unpickler would make room for as many
                raise ValueError(f"it numbers a value {number:,} within {length:,} bytes")
            memo[number] = stack[-1]
        elif name in _GETS:
            if argument not in memo:
                raise ValueError(f"it is damaged: it has no value number {argument}")
            stack.append(memo[argument])
            stack[-1].is_open = False
            again += stack[-1].values
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _NEVER_WRITTEN or argument == "builtins bytearray":  # of any size, from a number
            raise ValueError(f"it has {argument if name == 'GLOBAL' else name}, which no checkpoint needs")
        elif command.stack_before:
            again += _apply(command, stack, marks)
        elif command.stack_after:
            text = len(argument) // _TEXT if isinstance(argument, str | bytes) else 0
            stack.append(single if not text and argument is not None else _Size(1 + text, is_open=argument is None))
        if again > _MOST_PER_BYTE * length + _FEW:
            raise ValueError(f"its first {length:,} bytes repeat or copy {again:,} values")
        if len(stack) > _MOST_WAITING:
            raise ValueError(f"more than {_MOST_WAITING:,} of its values wait for a container")


def _apply(command: pickletools.OpcodeInfo, stack: list[_Size], marks: list[int]) -> int:
    """Do to the stack of sizes what a command does to the stack of values; returns how many values a call is given."""
    before, name = command.stack_before, command.name
    first = len(stack) - len(before)
    if pickletools.stackslice in before:
        first = marks.pop() - before.index(pickletools.markobject)
    if first < (marks[-1] if marks else 0):
        raise ValueError(f"it is damaged: there is nothing for its command {name}")
    taken = stack[first:]
    del stack[first:]
    if not command.stack_after:
        return 0
    made = taken.pop(0) if name in _FILLING else _Size(1, is_open=True)
    if not made.is_open:
        raise ValueError("it changes a value that is complete")
    given = sum(value.values for value in taken) if name in _CALLING else 0
    made.hold(taken)
    stack.append(made)
    return given


def save(path: Path, value: Any) -> None:
    """Write a file of torch.save, for other trainers. `value`: tensors, plain values, containers and
    argparse.Namespace."""
    torch.save(value, path)


def load_tensor(data: bytes, where: str) -> Tensor:
    """One tensor that torch.save wrote. Raises CheckpointError where it is anything else."""
    try:
        _require_stored(io.BytesIO(data), len(data))
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{where} is damaged, or no tensor: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(value, Tensor) or value.nbytes > len(data):
        raise CheckpointError(f"{where} is no tensor of its size")
    return value


def unpickle(path: Path, known: Mapping[str, Any]) -> Any:
    """What a plain pickle describes. `known`: what the names in it make: `torch.Size` -> tuple; another name is
    refused (CheckpointError). No functions, and classes only if built in or with `__setstate__`: a pickle can set
    attributes."""
    data = read_bounded(path, _MOST_INDEX)

    # The pickle decides which names are looked up, so that the answer comes from a table and never from an import.
    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full not in known:
                raise ValueError(f"it mentions {full[:120]}, which megacore does not load")
            return known[full]

    try:
        _require_modest(io.BytesIO(data))
        return Restricted(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes raise whatever the loader stumbles over
        raise CheckpointError(f"{path} was not loaded: {str(error)[:200]}") from None
