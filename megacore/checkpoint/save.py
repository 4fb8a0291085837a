"""Saving: every rank writes its own slices once, the first rank adds the manifest and publishes the directory."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megacore.checkpoint.manifest import MANIFEST_NAME, TOKENIZER_DIRECTORY, FileEntry, Manifest, Piece, TensorEntry
from megacore.checkpoint.state import MODEL, TrainingState
from megacore.checkpoint.storage import point_to, publish, write_tensors, write_text
from megacore.config import Config
from megacore.data.tokenizer import load_tokenizer
from megacore.errors import DataError, StorageError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh

T = TypeVar("T")
_Shards = dict[str, dict[str, Tensor]]  # file -> tensors by name
_Tables = dict[str, dict[str, TensorEntry]]  # kind -> entries by name
_Contribution = tuple[dict[str, FileEntry], _Tables]


def save_checkpoint(output_dir: Path, state: TrainingState, config: Config, mesh: Mesh) -> Path:
    """Write `output_dir/step_NNNNNNNN/`; every rank calls it at the same step.

    The directory is complete under its name or does not exist: everything is written and flushed under a temporary
    name that a reader ignores. Replicated and tied tensors are written once.

    Args:
        output_dir: the run's directory.
        state: this rank's view of the run.
        config: the resolved configuration, stored in the manifest.
        mesh: this rank's place.

    Returns:
        The published directory.

    Raises:
        StorageError: on every rank, where one could not write; nothing is left of the checkpoint then.
    """
    final = output_dir / f"step_{state.step:08d}"
    temporary = output_dir / f"{final.name}.tmp"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        if config.data.tokenizer is not None:
            load_tokenizer(config.data.tokenizer).save(temporary / TOKENIZER_DIRECTORY)
        manifest = _merge(contributions, state, config)
        write_text(temporary / MANIFEST_NAME, manifest.to_json())
        publish(temporary, final)
        point_to(final)

    first = mesh.world.rank == 0
    _together(begin if first else None, temporary, mesh)
    shards, tables = _own_slices(state, mesh)
    files = _together(
        lambda: {file: write_tensors(temporary / file, tensors) for file, tensors in shards.items()}, temporary, mesh
    )
    assert files is not None
    contributions: list[_Contribution] = all_gather_objects((files, tables), mesh.world)
    _together(finish if first else None, temporary, mesh)
    return final


def _together(write: Callable[[], T] | None, temporary: Path, mesh: Mesh) -> T | None:
    """Write, where this rank has something to write, and wait for all. Where one fails, all do, with its reason.

    Args:
        write: writes below `temporary`.
        temporary: the unfinished checkpoint, which is removed after a failure: it would take a full disk's last space.
        mesh: all of its ranks take part.

    Raises:
        StorageError: a rank could not write.
    """
    result, problem = None, None
    try:
        result = None if write is None else write()
    except (OSError, DataError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        problem = f"{getattr(error, 'filename', None) or temporary}: {reason}"
    problems = [text for text in all_gather_objects(problem, mesh.world) if text is not None]
    if problems:
        if mesh.world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"the checkpoint cannot be written: {problems[0]}")
    return result


def _own_slices(state: TrainingState, mesh: Mesh) -> tuple[_Shards, _Tables]:
    shards: _Shards = {}
    tables: _Tables = {}
    for kind, spec, tensor in state.entries():  # all data-parallel ranks take part, the first writes
        held_elsewhere = spec.name in state.tied_copies or (spec.dim is None and not mesh.tp.is_first)
        if not mesh.dp.is_first or held_elsewhere or tensor.numel() == 0:
            continue
        file = f"{kind}-pp{mesh.pp.rank}-tp{mesh.tp.rank}.safetensors"
        shards.setdefault(file, {})[spec.name] = tensor.cpu()
        starts, stops = zip(*spec.slices, strict=True)
        piece = Piece(file=file, start=list(starts), stop=list(stops))
        entry = TensorEntry(shape=list(spec.shape), dtype=str(tensor.dtype).removeprefix("torch."), pieces=[piece])
        tables.setdefault(kind, {})[spec.name] = entry
    return shards, tables


def _merge(contributions: list[_Contribution], state: TrainingState, config: Config) -> Manifest:
    files: dict[str, FileEntry] = {}
    tensors: dict[str, dict[str, TensorEntry]] = {MODEL: {}}
    for own_files, own_tables in contributions:
        files |= own_files
        for kind, table in own_tables.items():
            for name, entry in table.items():
                known = tensors.setdefault(kind, {}).setdefault(name, dataclasses.replace(entry, pieces=[]))
                known.pieces.extend(entry.pieces)
    parallel = config.parallel
    return Manifest(
        step=state.step,
        consumed_samples=state.consumed_samples,
        counters=state.counters,
        topology={"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp or 1},
        config=dataclasses.asdict(config),
        files=files,
        tensors=tensors,
    )
