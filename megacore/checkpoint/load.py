"""Loading: every rank reads the bytes of its own slices, whatever layout wrote them, from files whose content is
checked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.checkpoint.manifest import Manifest, Piece, TensorEntry, find_checkpoint, read_manifest, verify
from megacore.checkpoint.state import MODEL, TrainingState
from megacore.errors import CheckpointError
from megacore.parallel.sharding import ShardedParameter, ShardSpec


def load_checkpoint(path: Path, state: TrainingState) -> Manifest:
    """Fill this rank's weights and optimizer state, bit for bit.

    Args:
        path: a checkpoint, or a run's output directory, of which the newest is taken.
        state: where to.

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
    state.fill(_Reader(directory, manifest).read, () if missing else state.kinds, updates)
    return manifest


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
    reader = _Reader(directory, manifest)
    for parameter in parameters:
        parameter.zero_()
        parameter.spec.own(parameter).copy_(reader.read(MODEL, parameter.spec))
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


class _Reader:
    """Reads slices of global tensors; each file is verified once, before its first use."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._verified: set[str] = set()

    def read(self, kind: str, spec: ShardSpec) -> Tensor:
        """The slice `spec` of a global tensor, assembled from the pieces that overlap it."""
        entry = self._manifest.tensors[kind].get(spec.name)
        if entry is None:
            raise CheckpointError(f"{self._directory} has no {kind} of {spec.name}")
        wanted = spec.slices
        result = torch.empty([b - a for a, b in wanted], dtype=_dtype(entry))
        filled = 0
        for piece in entry.pieces:
            shared = [(max(a, c), min(b, d)) for (a, b), c, d in zip(wanted, piece.start, piece.stop, strict=True)]
            if all(a < b for a, b in shared):
                there = tuple(slice(a - c, b - c) for (a, b), c in zip(shared, piece.start, strict=True))
                here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, wanted, strict=True))
                values = self._slice(piece, spec.name, there)
                result[here] = values
                filled += values.numel()
        if filled != result.numel():
            raise CheckpointError(f"{self._directory}: the pieces of {kind} {spec.name} do not cover it")
        return result

    def _slice(self, piece: Piece, name: str, where: tuple[slice, ...]) -> Tensor:
        path = self._directory / piece.file
        if piece.file not in self._verified:
            if piece.file not in self._manifest.files:
                raise CheckpointError(f"{path} is not among the files of its manifest")
            verify(path, self._manifest.files[piece.file])
            self._verified.add(piece.file)
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice(name)
                if stored.get_shape() != [b - a for a, b in zip(piece.start, piece.stop, strict=True)]:
                    raise CheckpointError(f"{path}: {name} is not of the size that the manifest says")
                values: Tensor = stored[where]
                return values
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"unknown dtype {entry.dtype!r} in the manifest")
    return dtype
