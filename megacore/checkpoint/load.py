"""Loading: every rank reads the bytes of its slices, whatever layout wrote them, from files whose content is checked:
each by one of the ranks, so that together they read the checkpoint once for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megacore.checkpoint.compression_state import ERROR_KINDS
from megacore.checkpoint.files import refuse_unlisted, verify
from megacore.checkpoint.manifest import Manifest, Piece, find_checkpoint, read_manifest
from megacore.checkpoint.state import BUFFERS, MODEL, TrainingState
from megacore.checkpoint.tensor_file import DTYPES, read_slice
from megacore.checkpoint.tensor_header import StoredTensor, read_header
from megacore.config.fields import field_infos
from megacore.config.messages import ranks_in_words
from megacore.config.optimizers import EMA, OPTIMIZERS
from megacore.errors import CheckpointError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import ShardedParameter, Slices
from megacore.progress import Progress
from megacore.remote import Location

_HEADER_BYTES = 1 << 10  # that a tensor takes in the head of a file, with room for a long name
_LARGEST_HEADER = 1 << 26  # of a file whose header has been checked
_THREADS = 4  # that check files


def load_checkpoint(
    directory: Location, manifest: Manifest, state: TrainingState, world: Group, *, with_optimizer: bool = True
) -> None:
    """Fill this rank's weights and optimizer state, bit for bit; the ranks of `world` share the checking of files.
    Without `with_optimizer` the optimizer begins anew. Raises CheckpointError where a file is missing or damaged, or a
    tensor is missing or of another shape, each by name."""
    _require_same_model(manifest, state.data_parallel.parameters, directory)
    updates = manifest.updates
    names = [kind.name for kind in state.optimizer.kinds]
    missing = [name for name in names if name not in manifest.tensors]
    if with_optimizer and updates > 0 and not never_kept(manifest).issuperset(missing):
        raise CheckpointError(
            f"{directory} has no {' and no '.join(missing)} of the optimizer, after {updates} updates: "
            "its manifest is damaged: use an earlier step"
        )
    kinds = tuple(kind for kind in state.optimizer.kinds if with_optimizer and kind.name not in missing)
    buffers = {name for name, buffer in state.buffers.items() if buffer.numel()}
    if lacking := sorted(buffers - manifest.tensors.get(BUFFERS, {}).keys()):
        raise CheckpointError(f"{directory} is of another model: buffer {lacking[0]} is missing")
    names = [kind.name for kind in kinds]
    names += [kind for kind in ERROR_KINDS if with_optimizer]
    if problem := verified_together(directory, manifest, world, kinds=(MODEL, *names, BUFFERS)):
        raise CheckpointError(problem)
    errors = {
        kind: {name: entry.shape[0] for name, entry in manifest.tensors.get(kind, {}).items()}
        for kind in ERROR_KINDS
        if with_optimizer
    }
    state.fill(Reader(directory, manifest).read, kinds, updates, errors)


def read_together(path: Location, world: Group) -> tuple[Location, Manifest]:
    """Find and read a checkpoint's manifest on all ranks; their paths may differ, but not the checkpoint. Returns this
    rank's directory, and the manifest. Raises CheckpointError where a rank cannot read it, or reads another one than
    rank 0; on every rank, with the same text."""
    directory, manifest, problem, read = path, None, None, ""
    try:
        directory = find_checkpoint(path)
        manifest = read_manifest(directory)
        refuse_unlisted(directory, manifest.files)
        read = f"step {manifest.step}, manifest {manifest.manifest_sha256[:16]}"
    except CheckpointError as error:
        problem = str(error)
    everyone = all_gather_objects((str(directory), read, problem), world)
    if (problem := first_problem([text for *_, text in everyone])) is not None:
        raise CheckpointError(problem)
    assert manifest is not None
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, digest, _) in enumerate(everyone):
        ranks_of.setdefault(digest, []).append(rank)
    if len(ranks_of) > 1:
        choices = "; ".join(
            f"{ranks_in_words(ranks)}: {everyone[ranks[0]][0]} ({digest})" for digest, ranks in ranks_of.items()
        )
        raise CheckpointError(f"the ranks load different checkpoints: {choices}: give every rank the same one")
    return directory, manifest


def first_problem(problems: Sequence[str | None]) -> str | None:
    """What is wrong on some rank, from what each of them says is; with its number, unless all have a problem."""
    failed = [(rank, text) for rank, text in enumerate(problems) if text is not None]
    if not failed:
        return None
    rank, text = failed[0]
    return text if len(failed) == len(problems) else f"on rank {rank}: {text}"


def verified_together(
    directory: Location,
    manifest: Manifest,
    world: Group,
    *,
    kinds: Sequence[str] | None = None,
    archived: bool = False,
) -> str | None:
    """Check a checkpoint's files against its manifest, each on one of the ranks; what is wrong, the same on every rank,
    or None. `kinds`: of tensors whose files are checked; None: every file. `archived`: SHA-256 is taken as well."""
    used = manifest.files_of(kinds)
    names = manifest.files if kinds is None else used
    # The largest first, round robin, so that the ranks get about equally many bytes.
    by_size = sorted(names, key=lambda name: (-manifest.files[name].bytes, name))
    share, problem = by_size[world.rank :: world.size], None
    progress = Progress(f"verifying {directory.name}", sum(manifest.files[name].bytes for name in share))

    def check(name: str) -> None:
        verify(directory / name, manifest.files[name], archived=archived, on_read=progress.advance)

    try:
        with progress, ThreadPoolExecutor(_THREADS) as threads:  # hashing lets go of the interpreter's lock
            list(threads.map(check, share))
        for name in sorted(used)[world.rank :: world.size]:
            check_header(directory / name, manifest)
    except CheckpointError as error:
        problem = str(error)
    return next((text for text in all_gather_objects(problem, world) if text is not None), None)


def check_header(path: Location, manifest: Manifest) -> None:
    """Refuse a shard whose table is not what the manifest says, before anything believes it. Raises CheckpointError
    where its table is larger than its tensors need, or differs."""
    expected: dict[str, tuple[torch.dtype | None, tuple[int, ...]]] = {}
    for table in manifest.tensors.values():
        for name, entry in table.items():
            for piece in entry.pieces:
                if piece.file == path.name:
                    expected[name] = (getattr(torch, entry.dtype, None), _shape(piece))
    # A header of a stranger's size would be parsed in full before a tensor is looked at.
    stored = read_header(path, largest=_HEADER_BYTES * (len(expected) + 1))
    actual = {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in stored.items()}
    if actual != expected:
        name = next(name for name in (*expected, *actual) if expected.get(name) != actual.get(name))
        raise CheckpointError(f"{path} does not hold {name} as its manifest says: the file is of another checkpoint")


def never_kept(manifest: Manifest) -> set[str]:
    """Kinds of state that a run has under some settings, but not under those of the run that wrote the checkpoint: one
    of plain SGD may be resumed with momentum, and one without an average of the weights with one."""
    average = {EMA.name} if manifest.settings.get("ema_decay") is None else set[str]()
    kind = OPTIMIZERS.get(str(manifest.settings.get("optimizer")))
    if kind is None:
        return average
    written = kind(**{name: value for name, value in manifest.settings.items() if name in field_infos(kind)})
    return average | ({state.name for state in kind().state} - {state.name for state in written.state})


@torch.no_grad()
def load_parameters(
    path: Location, parameters: Iterable[ShardedParameter], buffers: Mapping[str, Tensor] | None = None
) -> Manifest:
    """Fill only parameters, in place, and `buffers` that the checkpoint has, by global name; else as `load_checkpoint`.
    `path`: a checkpoint, or a run's output directory."""
    weights = WeightsOfCheckpoint(path, ALONE)
    weights.fill(parameters)
    weights.fill_buffers(buffers or {})
    return weights.manifest


class WeightsOfCheckpoint:
    """Weights of a checkpoint, for parameters that are about to be used (`megacore.models.initialize.InitialWeights`).

    Args:
        path: a checkpoint, or a run's output directory, whose newest checkpoint is read.
        world: the ranks that read it together, and share the checking of its files.

    Attributes:
        manifest: of the checkpoint.

    Raises:
        CheckpointError: it cannot be read, on every rank.
    """

    def __init__(self, path: Location, world: Group) -> None:
        self._directory, self.manifest = read_together(path, world)
        if problem := verified_together(self._directory, self.manifest, world, kinds=[MODEL, BUFFERS]):
            raise CheckpointError(problem)
        self._reader = Reader(self._directory, self.manifest)

    @torch.no_grad()
    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""
        parameters = list(parameters)
        _require_same_model(self.manifest, parameters, self._directory)
        for parameter in parameters:
            # Padding is not stored, and is 0.
            parameter.zero_()
            values = self._reader.read(MODEL, parameter.spec.name, parameter.spec.slices)
            parameter.spec.unpadded(parameter).copy_(values)

    def fill_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give what is no parameter its values, in place, by global name, where the checkpoint has them."""
        for name in buffers.keys() & self.manifest.tensors.get(BUFFERS, {}).keys():
            wanted = tuple((0, size) for size in buffers[name].shape)
            buffers[name].copy_(self._reader.read(BUFFERS, name, wanted))


def _require_same_model(manifest: Manifest, parameters: Iterable[ShardedParameter], directory: Location) -> None:
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
    """Reads slices of global tensors out of the shards that hold them, and no byte more. `directory`: a checkpoint
    whose files are verified."""

    def __init__(self, directory: Location, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    def read(self, kind: str, name: str, wanted: Slices, out: Tensor | None = None) -> Tensor:
        """The slice `wanted`, [start, stop) of every dimension, of a global tensor of a `kind`, `model` or the
        optimizer's. `out`: contiguous, of the slice's shape; None: a new tensor of the stored dtype. Raises
        CheckpointError."""
        entry = self._manifest.tensors[kind].get(name)
        if entry is None:
            raise CheckpointError(f"{self._directory} has no {kind} of {name}")
        pieces = [(piece, self._stored(piece, name)) for piece in entry.pieces]
        dtype = DTYPES[pieces[0][1].dtype]
        if len(pieces) == 1:
            stored = pieces[0][1]
            if out is None or out.dtype == dtype:
                return read_slice(stored, wanted, out)
            return out.copy_(read_slice(stored, wanted))
        result = torch.empty([b - a for a, b in wanted], dtype=dtype) if out is None else out
        filled = 0
        for piece, stored in pieces:
            shared = [(max(a, c), min(b, d)) for (a, b), c, d in zip(wanted, piece.start, piece.stop, strict=True)]
            if all(a < b for a, b in shared):
                there = tuple((a - c, b - c) for (a, b), c in zip(shared, piece.start, strict=True))
                here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, wanted, strict=True))
                values = read_slice(stored, there)
                result[here] = values
                filled += values.numel()
        if filled != result.numel():
            raise CheckpointError(f"{self._directory}: the pieces of {kind} {name} do not cover it")
        return result

    def _stored(self, piece: Piece, name: str) -> StoredTensor:
        path = self._directory / piece.file
        if piece.file not in self._headers:
            self._headers[piece.file] = read_header(path, largest=_LARGEST_HEADER)
        stored = self._headers[piece.file].get(name)
        if stored is None or stored.shape != _shape(piece):
            raise CheckpointError(f"{path}: {name} is not of the size that the manifest says")
        return stored


def _shape(piece: Piece) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in zip(piece.start, piece.stop, strict=True))
