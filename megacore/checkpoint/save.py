"""Saving: every rank writes its slices once, the first rank adds the manifest and publishes the directory.

A save is a few pieces of work, each done by every rank independently, with an agreement of all after it: make the
directory, copy the state, write the shards, publish. One rank's exception becomes the same StorageError on all of them.
With --async-save the last two run in a thread, which does not communicate: the ranks agree in their main threads, where
they meet anyway, so that a slow or failing disk holds up no collective. storage.py writes the files.
"""

from __future__ import annotations

import dataclasses
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint import storage
from megacore.checkpoint.directory import expired, next_serial, pointed_to, published, real
from megacore.checkpoint.files import FileEntry
from megacore.checkpoint.manifest import (
    IN_DOUBT,
    Manifest,
    Piece,
    TensorEntry,
    marked_in_doubt,
    read_manifest,
    schema_of,
    sections_as_dicts,
)
from megacore.checkpoint.state import MODEL, TrainingState
from megacore.checkpoint.storage import LocalRun, RemoteRun, write_tensors
from megacore.config import ResolvedConfig
from megacore.data.gpt.build import tokenizer_of
from megacore.errors import CheckpointError, PeerFailed, StorageError, UserError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh, ReplicaRole
from megacore.progress import Progress
from megacore.remote import Location, RemotePath, location

_Shards = dict[str, dict[str, Tensor]]  # file -> tensors by name
_Tables = dict[str, dict[str, TensorEntry]]  # kind -> entries by name
_PATIENCE_SECONDS = 10.0  # with a thread that writes what is given up: a disk may hang for ever


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A published checkpoint."""

    step: int
    path: Location
    updates: int  # of the weights, as this start of the run counts them
    notes: tuple[str, ...] = ()  # what went wrong after it was published, and does not concern it


@dataclass(frozen=True, kw_only=True)
class Marked:
    """What has been marked in doubt."""

    paths: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # what went wrong, each a sentence that names the checkpoint or the file


class Work:
    """A part of a save that this rank does by itself, now or in a thread. Nothing that the part raises escapes: the
    ranks agree on the outcome, and one that left by itself would leave the others waiting in a collective."""

    def __init__(self, do: Callable[[], Any] | None, path: Location, *, background: bool) -> None:
        self.result: Any = None  # what the part returned
        self.problem: str | None = None  # why it failed, or None; empty where it failed only because another rank did
        self._do, self._path = do, path
        self._thread: threading.Thread | None = None
        if do is not None and background:
            thread = threading.Thread(target=self._run, name="save", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # the system gives no more threads
                self.problem, self._do = described(error, path), None
        elif do is not None:
            self._run()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        assert self._do is not None
        try:
            self.result = self._do()
        # The rank that failed says why.
        except PeerFailed:
            self.problem = ""
        except Exception as error:
            self.problem = described(error, self._path)
        finally:
            self._do = None  # and with it the state that it holds


def described(error: Exception, path: Location) -> str:
    """An exception in one line; one that nobody foresaw with its type and the line of code that raised it."""
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or error}"
    if isinstance(error, UserError | StorageError):
        return f"{path}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{path}: {type(error).__name__}: {error}".removesuffix(": ") + where


@dataclass(kw_only=True)
class _Job:
    """A save under way; the same on every rank, but for `work`."""

    draft: Manifest
    temporary: str
    final: str
    work: Work
    may_be_complete: bool = False
    is_publishing: bool = False


class CheckpointSaver:
    """Saves a run's state into its output directory; all ranks call each method together. `loaded`: the checkpoint that
    the run continues from, which is never deleted."""

    def __init__(self, config: ResolvedConfig, mesh: Mesh, *, loaded: Location | None = None) -> None:
        path = location(config.checkpoint_dir)
        self._run = RemoteRun(path) if isinstance(path, RemotePath) else LocalRun(path)
        self._config, self._mesh = config, mesh
        self._background = config.checkpoint.async_save
        self._tokenizer = tokenizer_of(config)  # the one that the run began with, whatever becomes of its file
        self._protected = () if loaded is None else (loaded,)
        self._staging: dict[tuple[str, str], Tensor] = {}
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the same on every rank."""
        return self._job is not None

    @property
    def is_waiting(self) -> bool:
        """Whether this rank's part of the next agreement is still to be done."""
        return self._job is not None and not self._job.work.is_done

    def begin(self, state: TrainingState) -> None:
        """Start to save the state as it is now; `finish` or `advance` end it. With --async-save the state may change
        once this returns. Raises StorageError on every rank, where one could not make the directory or copy its
        state."""
        assert self._job is None
        first = self._mesh.world.is_first
        make = Work((lambda: self._run.begin(state.step)) if first else None, self._run.path, background=False)
        temporary, final = self._agreed(make)[0]
        path = self._run.path / temporary
        try:
            stage = Work(lambda: (*self._stage(state), self._draft(state)), path, background=False)
            self._raise_first_of(all_gather_objects(stage.problem, self._mesh.world))
            shards, tables, draft = stage.result
            work = Work(lambda: self._write(temporary, shards, tables), path, background=self._background)
        except BaseException:
            self._discard(temporary)
            raise
        self._job = _Job(draft=draft, temporary=temporary, final=final, work=work)

    def advance(self) -> Saved | None:
        """Agree on what is done, and begin what follows; only if no rank is waiting. Returns the checkpoint, once it
        is published. Raises StorageError on every rank, where one could not write; nothing is left of the checkpoint
        then."""
        assert self._job is not None
        job = self._job
        job.may_be_complete = True  # and the first rank about to publish it
        try:
            results = self._agreed(job.work)
        except StorageError:
            self._job = None
            self._discard(job.temporary)
            raise
        if job.is_publishing:
            self._job = None
            path = self._run.path / job.final
            return Saved(step=job.draft.step, path=path, updates=job.draft.updates, notes=results[0])
        do = (lambda: self._publish(job, results)) if self._mesh.world.is_first else None
        path = self._run.path / job.temporary
        job.work, job.is_publishing = Work(do, path, background=self._background), True
        return None

    def finish(self) -> Saved | None:
        """Wait for the save under way, if there is one; returns and raises what `advance` does."""
        saved = None
        while self._job is not None:
            self._job.work.join()
            saved = self.advance()
        return saved

    def abandon(self) -> None:
        """Give up the save under way, without a word to the other ranks: they may be gone."""
        job, self._job = self._job, None
        if job is not None:
            job.work.join(_PATIENCE_SECONDS)
            # What no rank can have published, each removes once it writes no more, so that the last one leaves nothing.
            if job.work.is_done and (self._mesh.world.is_first or not job.may_be_complete):
                self._run.discard(job.temporary)

    def doubt(self, newest: Location) -> Marked:
        """Mark the run's checkpoints with the weights of `newest` as of no use, and let the pointer name the last that
        has others; only while no save is under way. One of another run, or a link to one, is left as it is."""
        work = Work((lambda: self._mark(newest)) if self._mesh.world.is_first else None, newest, background=False)
        # The others end the run only when the first rank has marked all: it would not outlive them.
        marked, problem = all_gather_objects((work.result, work.problem), self._mesh.world)[0]
        return marked if problem is None else Marked(problems=(f"no checkpoint is marked in doubt: {problem}",))

    def _mark(self, newest: Location) -> Marked:
        ours = [path for path in published(self._run.path) if not isinstance(path, Path) or not path.is_symlink()]
        if real(newest) not in map(real, ours):
            return Marked()
        weights, sound, marked, problems = read_manifest(newest).weights, None, list[str](), list[str]()
        for path in ours:
            try:
                manifest = read_manifest(path)
            except CheckpointError:  # a damaged one is never taken
                continue
            if manifest.is_in_doubt:
                continue
            if manifest.weights != weights:
                sound = sound or path
                continue
            try:  # a rollback saves the weights once more
                self._run.replace_manifest(path.name, marked_in_doubt(path))
                marked.append(str(path))
            except Exception as error:
                problems.append(f"--load auto still takes {path}, {IN_DOUBT}: {described(error, path)}")
        try:
            if sound is not None:
                self._run.point_to(sound.name)
        except Exception as error:
            problems.append(described(error, self._run.path))
        return Marked(paths=tuple(marked), problems=tuple(problems))

    def _discard(self, temporary: str) -> None:
        if self._mesh.world.is_first:
            self._run.discard(temporary)

    def _agreed(self, work: Work) -> list[Any]:
        """Every rank's result, or what the first rank with a problem says, on all of them."""
        outcomes = all_gather_objects((work.problem, work.result), self._mesh.world)
        self._raise_first_of([problem for problem, _ in outcomes])
        return [result for _, result in outcomes]

    def _raise_first_of(self, problems: list[str | None]) -> None:
        failed = [problem for problem in problems if problem is not None]
        if failed:
            reason = next((problem for problem in failed if problem), "a rank gave no reason")
            raise StorageError(f"the checkpoint cannot be written: {reason}")

    def _stage(self, state: TrainingState) -> tuple[_Shards, _Tables]:
        """What this rank writes: tensors in host memory, which training does not change before they are written."""
        mesh, shards, tables = self._mesh, _Shards(), _Tables()
        loads: dict[ReplicaRole, list[int]] = {}  # elements that each rank of a replica group writes
        problem: Exception | None = None
        for kind, spec, tensor, is_own in state.entries():
            if tensor.numel() == 0 or not spec.is_counted_by(mesh):
                continue
            replicas = mesh.replica_group(spec.replica_role)
            load = loads.setdefault(spec.replica_role, [0] * replicas.size)
            # Replicated and tied tensors are written once, by the replica that has least to write so far.
            writer = replicas.rank if is_own else load.index(min(load))
            load[writer] += 0 if is_own else tensor.numel()  # the same on every rank
            if writer != replicas.rank or problem is not None:
                continue
            file = f"{kind}-{mesh.file_label}.safetensors"
            piece = Piece(file=file, start=[start for start, _ in spec.slices], stop=[stop for _, stop in spec.slices])
            entry = TensorEntry(shape=list(spec.shape), dtype=str(tensor.dtype).removeprefix("torch."), pieces=[piece])
            try:
                shards.setdefault(file, {})[spec.name] = self._kept(kind, spec.name, tensor.detach())
            except Exception as error:  # the other replicas still need this rank to gather the rest
                problem = error
                shards.clear()
            tables.setdefault(kind, {})[spec.name] = entry
        if problem is not None:
            raise problem
        storage.passing("staged")
        return shards, tables

    def _kept(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        """The tensor in host memory; in the background a copy, in memory that is taken from the system once."""
        if not self._background:
            on_host = tensor.cpu()
            # A slice of a gathered bucket would keep all of the bucket in memory until it is written.
            is_slice = on_host.untyped_storage().nbytes() > 2 * on_host.nbytes
            return on_host.clone() if is_slice and self._mesh.replicas.size > 1 else on_host
        buffer = self._staging.get((kind, name))
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
            self._staging[kind, name] = buffer
        return buffer.copy_(tensor)

    def _draft(self, state: TrainingState) -> Manifest:
        return Manifest(
            step=state.step,
            consumed_samples=state.consumed_samples,
            counters=state.counters,
            series=state.series,
            topology=dict(self._mesh.degrees),
            config=sections_as_dicts(self._config),
        )

    def _publish(self, job: _Job, contributions: list[tuple[dict[str, FileEntry], _Tables]]) -> tuple[str, ...]:
        """Complete the directory and give it its name; what goes wrong after that is returned."""
        files, tensors = _merged(contributions)
        fingerprint = None
        if self._tokenizer is not None:
            files |= self._run.write_tokenizer(job.temporary, self._tokenizer.save)
            fingerprint = self._tokenizer.fingerprint
        manifest = dataclasses.replace(
            job.draft,
            schema=schema_of(tensors),
            serial=next_serial(self._run.path),
            files=files,
            tensors=tensors,
            tokenizer=fingerprint,
        )
        # What fails from here on is a note: the checkpoint is there.
        self._run.publish(job.temporary, job.final, manifest.to_json())
        notes = []
        if manifest.is_in_doubt:  # nothing is deleted for it
            directory = self._run.path / job.final
            notes.append(f"--load auto passes over {directory}, {IN_DOUBT}; --load {directory} takes it")
            return tuple(notes)
        try:
            self._run.point_to(job.final)
            self._retire(self._run.path / job.final)
        except Exception as error:
            notes.append(described(error, self._run.path))
        storage.passing("done")
        return tuple(notes)

    def _retire(self, newest: Location) -> None:
        options, run = self._config.checkpoint, self._run.path
        pointed = pointed_to(run)
        protected = [newest, *self._protected, *([] if pointed is None else [pointed])]
        old = expired(run, keep_last=options.keep_last, keep_every=options.keep_every, protected=protected)
        for directory in old:
            self._run.retire(directory.name)

    def _write(self, temporary: str, shards: _Shards, tables: _Tables) -> tuple[dict[str, FileEntry], _Tables]:
        total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
        with Progress("saving", total) as progress:
            files = {
                file: write_tensors(self._run.path / temporary / file, tensors, progress.advance)
                for file, tensors in shards.items()
            }
        return files, tables


def _merged(contributions: list[tuple[dict[str, FileEntry], _Tables]]) -> tuple[dict[str, FileEntry], _Tables]:
    files: dict[str, FileEntry] = {}
    tensors: _Tables = {MODEL: {}}
    for files_of_rank, tables in contributions:
        files |= files_of_rank
        for kind, table in tables.items():
            for name, entry in table.items():
                merged = tensors.setdefault(kind, {}).setdefault(name, dataclasses.replace(entry, pieces=[]))
                merged.pieces.extend(entry.pieces)
    return files, tensors
