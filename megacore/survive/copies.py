"""The state of a run in the memory of its node, as the ranks of each generation leave it and the keepers find it.

    DIRECTORY/g3/slot-1/model-00002.0.safetensors   a rank's part of the weights, mapped into its memory
    DIRECTORY/g3/slot-1/rank-00002.json             says which step the files of this rank hold, and their XXH3

A rank writes its step into one of two slots by turns: first it takes the old record of the slot away, and the new one
comes last, by a rename. So what is written half is never taken. A slot in which every rank has a record of the same
step becomes an ordinary checkpoint by a manifest, and is loaded like any other, on any layout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.files import FileEntry, verify
from megacore.checkpoint.manifest import Manifest, Piece, TensorEntry, schema_of
from megacore.errors import CheckpointError
from megacore.files import replace_bytes, take_lock
from megacore.job_directory import job_directories, job_directory, make

SLOTS = 2
NO_SHA256 = "0" * 64  # memory is no archive: XXH3 alone is taken, at the speed of memory
_PURPOSE = "survive"  # of the directory (job_directory)
_GENERATION = re.compile(r"g(\d+)")
_THREADS = 4
_NOTE = 4096  # bytes


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A step of which every rank's part is there, and as it was written."""

    step: int
    directory: Path


class NodeMemory:
    """The memory of a job on this node. It is gone when the last keeper leaves; what a killed job has left, the next
    keeper of this user removes. Raises OSError where it cannot be made."""

    def __init__(self, environment: Mapping[str, str], output_dir: str, rank: int) -> None:
        self.path = job_directory(_PURPOSE, environment, output_dir)
        for other in job_directories(_PURPOSE):
            if other != self.path and not _is_kept(other):
                shutil.rmtree(other, ignore_errors=True)
        self._output_dir = os.path.abspath(output_dir)
        self._lock = self.path / f"keeper-{rank}.lock"
        while not self._locked():  # a keeper that leaves, or one of another job, removes it meanwhile
            time.sleep(0.01)

    def _locked(self) -> bool:
        make(self.path)
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            take_lock(self._descriptor, patience=5.0)  # a child of a killed keeper may still end
            if os.path.samestat(self._lock.stat(), os.fstat(self._descriptor)):
                return True
            os.close(self._descriptor)
        return False

    def note(self, child: int) -> None:
        """Say which process trains for this keeper now; 0: none does."""
        said = json.dumps({"keeper": os.getpid(), "child": child, "output_dir": self._output_dir})
        os.pwrite(self._descriptor, said.ljust(_NOTE).encode(), 0)

    def leave(self) -> None:
        """This keeper needs the memory no more."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
            self._lock.unlink()
        if not _is_kept(self.path):
            shutil.rmtree(self.path, ignore_errors=True)

    def newest(self, beat: Callable[[], None] = lambda: None) -> tuple[Whole | None, list[str]]:
        """The newest step that is whole, with its manifest written, or None; and what is wrong with newer ones. `beat`:
        called now and then meanwhile."""
        problems = []
        for step, directory, records in sorted(self._candidates(), key=lambda found: found[:2], reverse=True):
            if problem := _problem(step, directory, records, beat):
                problems.append(problem)
                continue
            replace_bytes(directory / MANIFEST_NAME, _manifest(records).encode(), durable=False)
            return Whole(step=step, directory=directory), problems
        return None, problems

    def _candidates(self) -> Iterator[tuple[int, Path, list[dict[str, Any]]]]:
        """The slots that hold anything, each with its records of the newest step in it."""
        for directory in self.path.glob("g*/slot-*"):
            records: list[dict[str, Any]] = []
            for path in sorted(directory.glob("rank-*.json")):
                with contextlib.suppress(OSError, ValueError):
                    records.append(json.loads(path.read_bytes()))
            if records:
                step = max(record["step"] for record in records)
                yield step, directory, [record for record in records if record["step"] == step]


def keepers() -> Iterator[tuple[int, dict[str, Any]]]:
    """The rank of each keeper of this user on this machine, and what it has noted."""
    for path in (path for directory in job_directories(_PURPOSE) for path in directory.glob("keeper-*.lock")):
        with contextlib.suppress(OSError, ValueError):
            yield int(path.stem.rpartition("-")[2]), json.loads(path.read_bytes())


def remove_older(directory: Path, generation: int, *, kept: str | None = None) -> None:
    """Remove what generations before this one have left in a node's memory, but for the slot `kept`."""
    for slot in directory.glob("g*/slot-*"):
        is_older = (found := _GENERATION.fullmatch(slot.parent.name)) and int(found[1]) < generation
        if is_older and str(slot) != kept:
            shutil.rmtree(slot, ignore_errors=True)


def _is_kept(directory: Path) -> bool:
    """Whether a keeper of this memory lives."""
    for path in directory.glob("keeper-*.lock"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                take_lock(descriptor)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False


def _problem(step: int, directory: Path, records: list[dict[str, Any]], beat: Callable[[], None]) -> str | None:
    """Why a slot is no whole step; None where it is one."""
    if len(records) < (ranks := records[0]["ranks"]):
        return f"step {step} is there of {len(records)} of {ranks} ranks"
    entries = {name: FileEntry(**entry) for record in records for name, entry in record["files"].items()}
    try:
        with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets go of the interpreter's lock
            looks = [threads.submit(verify, directory / name, entry) for name, entry in entries.items()]
            while wait(looks, timeout=0.5).not_done:
                beat()
            for look in looks:
                look.result()
    except CheckpointError as error:
        return f"step {step}: {error}"
    return None


def _manifest(records: list[dict[str, Any]]) -> str:
    """One manifest from what all ranks say."""
    head = {name: value for name, value in records[0].items() if name not in ("ranks", "files", "tensors")}
    files: dict[str, FileEntry] = {}
    tables: dict[str, dict[str, TensorEntry]] = {"model": {}}
    for record in records:
        files |= {name: FileEntry(**entry) for name, entry in record["files"].items()}
        for kind, table in record["tensors"].items():
            for name, entry in table.items():
                new = TensorEntry(shape=entry["shape"], dtype=entry["dtype"], pieces=[])
                there = tables.setdefault(kind, {}).setdefault(name, new)
                there.pieces.extend(Piece(**piece) for piece in entry["pieces"])
    config = next(record["config"] for record in records if record["config"])  # the first rank's alone has one
    facts = {**head, "config": config, "files": files, "tensors": tables, "schema": schema_of(tables)}
    return Manifest(**facts).to_json()
