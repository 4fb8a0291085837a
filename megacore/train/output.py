"""A run's hold on its output directory: one writer, what it continues from, and its configuration on record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from megacore.checkpoint import WriterLock, choose_checkpoint, published, sees_lock, sweep
from megacore.config import ResolvedConfig
from megacore.config.messages import ranks_in_words
from megacore.config.toml import save_toml
from megacore.errors import StorageError, UserError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group, Mesh
from megacore.remote import Location, location
from megacore.train.survival import survival

C = TypeVar("C", bound=ResolvedConfig)
PATIENCE_SECONDS = 30.0  # a network file system may remember for so long that a file is not there


@contextlib.contextmanager
def output_directory(config: C, mesh: Mesh) -> Iterator[C]:
    """Hold the output directory during the run; all ranks enter together. Yields the configuration with the very
    checkpoint that the run continues from as --load, or without one. Raises UserError where another run writes there, a
    rank has another directory, or there is nothing to continue from; on every rank; StorageError where the directory
    cannot be written."""
    lock = _claim(config, mesh)
    try:
        resumed = survival().continued(config, mesh)
        choice = choose_checkpoint(resumed, mesh.world)
        if mesh.world.is_first:
            for problem in choice.refused:
                _warn(f"passed over a checkpoint: {problem}")
            if resumed.checkpoint.load is None and not config.training.skip_train:
                _tell_of_earlier(location(config.checkpoint_dir), keep_last=config.checkpoint.keep_last)
            settings = Path(config.training.output_dir) / "config.toml"
            # An evaluation leaves those of the training, and what continues from memory those of its start.
            if not (settings.exists() and (config.training.skip_train or resumed is not config)):
                save_toml(config, settings)
        load = None if choice.directory is None else str(choice.directory)
        yield dataclasses.replace(resumed, checkpoint=dataclasses.replace(resumed.checkpoint, load=load))
    finally:
        if lock is not None:
            lock.release()


def _tell_of_earlier(checkpoints: Location, *, keep_last: int | None) -> None:
    """Warn that a run without --load begins at step 0, where it could continue. `checkpoints`: the directory that the
    run saves into. `keep_last`: as for `expired`, which counts the earlier checkpoints too."""
    if published(checkpoints):
        theirs = "they are kept" if keep_last is None else f"--keep-last {keep_last} deletes them as this run saves"
        _warn(
            f"{checkpoints} holds checkpoints of an earlier run, and this run begins at step 0: {theirs}. --load auto "
            "continues from the newest valid one"
        )


def _claim(config: ResolvedConfig, mesh: Mesh) -> WriterLock | None:
    """The first rank's lock; where it does not get it, every rank fails with its reason."""
    lock: WriterLock | None = None
    problem: Exception | None = None
    run = Path(config.training.output_dir)
    if mesh.world.is_first:
        try:
            lock = WriterLock(run)
            if lock.warning is not None:
                _warn(lock.warning)
            checkpoints = location(config.checkpoint_dir)
            if left := sweep(checkpoints):
                _warn(f"removed what an interrupted save had left in {checkpoints}: {', '.join(left)}")
        except UserError as error:
            problem = UserError(str(error))
        except OSError as error:
            problem = StorageError(f"{error.filename or run}: {error.strerror}")
    token = None if lock is None else lock.token
    place = socket.gethostname(), os.path.realpath(run)
    first: tuple[Exception | None, str | None, tuple[str, str]]
    first = all_gather_objects((problem, token, place), mesh.world)[0]
    problem, token, (host, directory) = first
    if problem is not None:
        raise problem
    assert token is not None
    try:
        if config.checkpoint.save is None:
            is_elsewhere = place[0] == host and place[1] != directory
            _require_one_directory(run, token, mesh.world, patience=0.0 if is_elsewhere else PATIENCE_SECONDS)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _require_one_directory(run: Path, token: str, world: Group, *, patience: float) -> None:
    """Every rank writes its part of a checkpoint: one that writes elsewhere would fail only at the first save. `token`:
    in the lock of the first rank. `patience`: seconds until this rank must see that lock."""
    missed = None if world.is_first or sees_lock(run, token, patience=patience) else str(run)
    elsewhere = {rank: path for rank, path in enumerate(all_gather_objects(missed, world)) if path is not None}
    if elsewhere:
        raise UserError(
            f"--output-dir {next(iter(elsewhere.values()))} of {ranks_in_words(list(elsewhere))} is not the directory "
            f"that rank 0 writes to: give every rank the same one, on a file system that all nodes share"
        )


def _warn(text: str) -> None:
    print(f"megacore: warning: {text}", file=sys.stderr, flush=True)
