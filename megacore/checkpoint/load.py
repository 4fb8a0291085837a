"""Loading: every rank reads the bytes of its own slices, whatever layout wrote them, from files whose content is
checked: each by one of the ranks, so that together they read the checkpoint once for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.checkpoint.manifest import Manifest, Piece, TensorEntry, find_checkpoint, read_manifest, verify
from megacore.checkpoint.state import MODEL, Slices, TrainingState
from megacore.checkpoint.storage import DTYPES
from megacore.errors import CheckpointError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import ShardedParameter

_HEADER_BYTES = 1 << 10  # that a tensor takes in the head of a file, with room for a long name
_THREADS = 4  # that check files
_OPEN_FILES = 32  # of a reader, at most


def load_checkpoint(path: Path, state: TrainingState, world: Group = ALONE) -> Manifest:
    """Fill this rank's weights and optimizer state, bit for bit.

    Args:
        path: a checkpoint, or a run's output directory, of which the newest is taken.
        state: where to.
        world: the ranks that load together, and share the checking of files.

    Returns:
        The checkpoint's manifest: step, position in the data, counters.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing or of another shape, each by name.
    """
    directory = find_checkpoint(path)
    manifest = read_manifest(directory)
    _require_same_model(manifest, state.data_parallel.parameters, directory)
    updates = int(manifest.counters.get("updates", manifest.step))
    missing = [kind for kind in state.kinds if kind not in manifest.tensors]
    if updates > 0 and any(kind not in _never_kept(manifest) for kind in missing):
        raise CheckpointError(
            f"{directory} has no {' and no '.join(missing)} of the optimizer, after {updates} updates: "
            "its manifest is damaged: use an earlier step"
        )
    kinds = () if missing else state.kinds
    if problem := verified_together(directory, manifest, world, kinds=(MODEL, *kinds)):
        raise CheckpointError(problem)
    state.fill(Reader(directory, manifest).read, kinds, updates)
    return manifest


def verified_together(
    directory: Path, manifest: Manifest, world: Group, *, kinds: Iterable[str] | None = None
) -> str | None:
    """Check a checkpoint's files against its manifest, each on one of the ranks.

    Args:
        directory: the checkpoint.
        manifest: its.
        world: the ranks that call this together.
        kinds: of tensors whose files are checked; None: every file.

    Returns:
        What is wrong, the same on every rank; None where all is well.
    """
    kinds = None if kinds is None else tuple(kinds)
    tables = manifest.tensors.values() if kinds is None else [manifest.tensors.get(kind, {}) for kind in kinds]
    used = {piece.file for table in tables for entry in table.values() for piece in entry.pieces}
    names = manifest.files if kinds is None else used
    by_size = sorted(names, key=lambda name: (-manifest.files[name].bytes, name))
    problem = None
    try:
        with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets go of the interpreter's lock
            own = by_size[world.rank :: world.size]
            list(threads.map(lambda name: verify(directory / name, manifest.files[name]), own))
        for name in sorted(used)[world.rank :: world.size]:
            check_header(directory / name, manifest)
    except CheckpointError as error:
        problem = str(error)
    return next((text for text in all_gather_objects(problem, world) if text is not None), None)


def check_header(path: Path, manifest: Manifest) -> None:
    """Refuse a shard whose own table is not what the manifest says, before anything believes it.

    Raises:
        CheckpointError: its table is larger than its tensors need, or differs.
    """
    expected: dict[str, tuple[str, list[int]]] = {}
    for table in manifest.tensors.values():
        for name, entry in table.items():
            for piece in entry.pieces:
                if piece.file == path.name:
                    shape = [stop - start for start, stop in zip(piece.start, piece.stop, strict=True)]
                    expected[name] = (DTYPES.get(entry.dtype, "none"), shape)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_BYTES * (len(expected) + 1) or length + 8 > os.fstat(file.fileno()).st_size:
                raise CheckpointError(
                    f"{path} has a table of {length:,} bytes for {len(expected)} tensors: the file is damaged"
                )
            header = json.loads(file.read(length))
        found = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a table that cannot be read: the file is damaged") from None
    if found != expected:
        name = next(name for name in (*expected, *found) if expected.get(name) != found.get(name))
        raise CheckpointError(f"{path} does not hold {name} as its manifest says: the file is of another checkpoint")


def _never_kept(manifest: Manifest) -> tuple[str, ...]:
    """Optimizer state that the run which wrote the checkpoint had no use for: plain SGD may go on with momentum."""
    optimizer = manifest.config.get("optimizer", {})
    plain = optimizer.get("optimizer") == "sgd" and not optimizer.get("sgd_momentum")
    return ("momentum_buffer",) if plain else ()


@torch.no_grad()
def load_parameters(path: Path, parameters: Iterable[ShardedParameter]) -> Manifest:
    """Fill parameters alone, in place, for use without an optimizer (generation); otherwise as `load_checkpoint`."""
    parameters = list(parameters)
    directory = find_checkpoint(path)
    manifest = read_manifest(directory)
    _require_same_model(manifest, parameters, directory)
    if problem := verified_together(directory, manifest, ALONE, kinds=[MODEL]):
        raise CheckpointError(problem)
    reader = Reader(directory, manifest)
    for parameter in parameters:
        parameter.zero_()
        parameter.spec.own(parameter).copy_(reader.read(MODEL, parameter.spec.name, parameter.spec.slices))
    return manifest


def _require_same_model(manifest: Manifest, parameters: Iterable[ShardedParameter], directory: Path) -> None:
    problems = []
    stored = manifest.tensors.get(MODEL, {})
    for parameter in parameters:
        spec = parameter.spec
        if spec.name not in stored:
            problems.append(f"{spec.name} is missing")
        elif tuple(stored[spec.name].shape) != spec.shape:
            problems.append(f"{spec.name} is {tuple(stored[spec.name].shape)} there, but {spec.shape} in this model")
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(
            f"{directory} is of another model: {shown}. Use its config.toml, or the flags that it was made with"
        )


class Reader:
    """Reads slices of global tensors out of the shards that hold them, and no byte more.

    Args:
        directory: a checkpoint whose files are verified.
        manifest: its.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._open: dict[str, Any] = {}

    def read(self, kind: str, name: str, wanted: Slices) -> Tensor:
        """A slice of a global tensor, assembled from the pieces that overlap it.

        Args:
            kind: `model`, or the optimizer's.
            name: global.
            wanted: [start, stop) of every dimension.

        Raises:
            CheckpointError: the tensor is not there, or a file cannot be read.
        """
        entry = self._manifest.tensors[kind].get(name)
        if entry is None:
            raise CheckpointError(f"{self._directory} has no {kind} of {name}")
        dtype = _dtype(entry)
        if len(entry.pieces) == 1:
            (piece,) = entry.pieces
            return self._slice(piece, name, tuple(slice(a, b) for a, b in wanted))
        result = torch.empty([b - a for a, b in wanted], dtype=dtype)
        filled = 0
        for piece in entry.pieces:
            shared = [(max(a, c), min(b, d)) for (a, b), c, d in zip(wanted, piece.start, piece.stop, strict=True)]
            if all(a < b for a, b in shared):
                there = tuple(slice(a - c, b - c) for (a, b), c in zip(shared, piece.start, strict=True))
                here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, wanted, strict=True))
                values = self._slice(piece, name, there)
                result[here] = values
                filled += values.numel()
        if filled != result.numel():
            raise CheckpointError(f"{self._directory}: the pieces of {kind} {name} do not cover it")
        return result

    def _slice(self, piece: Piece, name: str, where: tuple[slice, ...]) -> Tensor:
        path = self._directory / piece.file
        try:
            stored = self._file(path).get_slice(name)
            if stored.get_shape() != [b - a for a, b in zip(piece.start, piece.stop, strict=True)]:
                raise CheckpointError(f"{path}: {name} is not of the size that the manifest says")
            values: Tensor = stored[where] if where else self._file(path).get_tensor(name)
            return values
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def _file(self, path: Path) -> Any:
        """The open file: slices that follow one another mostly come from a few."""
        if path.name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[path.name] = safe_open(path, framework="pt")
        return self._open[path.name]


def _dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {entry.dtype!r} in the manifest")
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype
