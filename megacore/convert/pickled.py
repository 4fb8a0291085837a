"""Reads the pickles of other trainers' checkpoints without running what they say, and writes such files.

`load` is for files of torch.save: torch's restricted loader takes tensors, numbers, texts and containers, and refuses
everything else. `unpickle` is for the index of torch.distributed.checkpoint, which is a plain pickle: it makes only
what it is told to. In both an inert class replaces each name that such files mention and nobody here needs (random
states, enumerations, settings), so that none of their code runs.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.errors import CheckpointError
from megacore.files import read_bounded

_MOST_INDEX = 1 << 30


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


def load(path: Path, *, unneeded: Sequence[str] = (), allowed: Sequence[Any] = ()) -> Any:
    """What torch.save wrote; only tensors that are used are brought into memory, where the file's form allows it.

    Args:
        path: the file.
        unneeded: full names of classes and functions that it may mention, which an inert class replaces.
        allowed: classes of which it may hold instances.

    Raises:
        CheckpointError: it mentions anything else, or is damaged.
    """
    known: list[Any] = [*allowed, *((Inert, name) for name in unneeded)]
    try:
        with torch.serialization.safe_globals(known):
            return _read(path)
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
    if zipped:
        with zipfile.ZipFile(path) as archive:
            _require_stored(archive, path.stat().st_size)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)


def _require_stored(archive: zipfile.ZipFile, size: int) -> None:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its archive is compressed, which torch.save does not do")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("the parts of its archive are larger than the file")


def save(path: Path, value: Any) -> None:
    """Write a file of torch.save, for other trainers.

    Args:
        path: of the file.
        value: tensors, plain values, containers and argparse.Namespace.
    """
    torch.save(value, path)


def load_tensor(data: bytes, where: str) -> Tensor:
    """One tensor that torch.save wrote.

    Raises:
        CheckpointError: it is anything else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _require_stored(archive, len(data))
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{where} is damaged, or no tensor: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(value, Tensor) or value.nbytes > len(data):
        raise CheckpointError(f"{where} is no tensor of its size")
    return value


def unpickle(path: Path, known: Mapping[str, Any]) -> Any:
    """What a plain pickle describes.

    Args:
        path: the file.
        known: what the names in it make: `torch.Size` -> tuple. Any other name is refused. No functions, and classes
            only if built in or with `__setstate__`: a pickle can set attributes of other objects that it is given.

    Raises:
        CheckpointError: it has another name, or is damaged.
    """
    data = read_bounded(path, _MOST_INDEX)

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full not in known:
                raise ValueError(f"it mentions {full[:120]}, which megacore does not load")
            return known[full]

    try:
        return Restricted(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes raise whatever the loader stumbles over
        raise CheckpointError(f"{path} was not loaded: {str(error)[:200]}") from None
