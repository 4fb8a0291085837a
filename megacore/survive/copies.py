"""The state of a run in the memory of its node, as the ranks of each generation leave it and the keepers find it.

    DIRECTORY/g3/slot-1/model-00002.0.safetensors   a rank's part of the weights, mapped into its memory
    DIRECTORY/g3/slot-1/rank-00002.json             says which step the files of this rank hold, and their XXH3

A rank writes its step into one of two slots by turns: first it takes the old record of the slot away, and the new one
comes last, by a rename. So what is written half is never taken. With several nodes, each also has the parts of the
ranks of the node before it (peers.py). A slot of which the nodes together have every rank's part of the same step
becomes an ordinary checkpoint by a manifest, and is loaded like any other, on any layout.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.checkpoint.directory import MANIFEST_NAME, next_serial
from megacore.checkpoint.files import FileEntry, describe, verify
from megacore.checkpoint.manifest import Manifest, Piece, TensorEntry, read_manifest, schema_of
from megacore.errors import CheckpointError, StorageError
from megacore.files import replace_bytes, sync, take_lock
from megacore.job_directory import job_directories, job_directory, make

if TYPE_CHECKING:
    from megacore.checkpoint.storage import LocalRun
    from megacore.data.tokenizers.tokenizer import Tokenizer

SLOTS = 2
NO_SHA256 = "0" * 64  # memory is no archive: XXH3 alone is taken, at the speed of memory
_PURPOSE = "survive"  # of the directory (job_directory)
_GENERATION = re.compile(r"g(\d+)")
_THREADS = 4
_NOTE = 4096  # bytes
_SECONDS_FOR_ROOM = 2.0


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What the memory of a node has of a step.

    Attributes:
        step: which.
        name: of the slot, as `g3/slot-1`; the same on all nodes.
        ranks: of the generation that wrote it.
        parts: the ranks whose parts are here, as they were written.
        bytes: of a part, the largest.
    """

    step: int
    name: str
    ranks: int
    parts: list[int]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What the memory of a node has.

    Attributes:
        slots: by what the ranks have noted; the newest first.
        problems: what is damaged in those that are checked, or could not be saved.
        free: bytes.
        checked: the slots whose content has been compared with its checksums, by name.
        saved: the unfinished checkpoint on disk that has got this node's share of the parts.
    """

    slots: list[Slot]
    problems: list[str]
    free: int
    checked: Sequence[str] = ()
    saved: str = ""


class NodeMemory:
    """The memory of a job on this node. It is gone when the last keeper leaves; what a killed job has left, the next
    keeper of this user removes. `node`: tells it from the memory of every other node. Raises OSError where it cannot be
    made."""

    def __init__(self, environment: Mapping[str, str], output_dir: str, rank: int) -> None:
        self.path = job_directory(_PURPOSE, environment, output_dir)
        for other in job_directories(_PURPOSE):
            if other != self.path:
                _remove_unless_kept(other)
        self._output_dir = os.path.abspath(output_dir)
        self._lock = self.path / f"keeper-{rank}.lock"
        while not self._locked():  # a keeper that leaves, or one of another job, removes it meanwhile
            time.sleep(0.01)
        self.node = self._named()

    def _locked(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            make(self.path)
            self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            take_lock(self._held, patience=5.0, shared=True)
            if os.path.samestat(self.path.stat(), os.fstat(self._held)):  # nobody removes it any more
                self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                take_lock(self._descriptor, patience=5.0)  # a child of a killed keeper may still end
                return True
            os.close(self._held)
        return False

    def _named(self) -> str:
        """A name that the keepers have in common which share this memory."""
        name, own = self.path / "node", self.path / f"node-{uuid.uuid4().hex}"
        own.write_text(own.name)
        with contextlib.suppress(FileExistsError):
            os.link(own, name)  # whole, and once
        own.unlink()
        return name.read_text()

    def note(self, child: int) -> None:
        """Say which process trains for this keeper now; 0: none does."""
        said = json.dumps({"keeper": os.getpid(), "child": child, "output_dir": self._output_dir})
        os.pwrite(self._descriptor, said.ljust(_NOTE).encode(), 0)

    def leave(self) -> None:
        """This keeper needs the memory no more."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
            self._lock.unlink()
            os.close(self._held)
        _remove_unless_kept(self.path)

    def inventory(self) -> Inventory:
        """What is here, of which nothing is checked yet."""
        slots = []
        for step, directory, records in sorted(self._candidates(), key=lambda found: found[:2], reverse=True):
            ranks = next(iter(records.values()))["ranks"]
            size = max(sum(entry["bytes"] for entry in record["files"].values()) for record in records.values())
            name = str(directory.relative_to(self.path))
            slots.append(Slot(step=step, name=name, ranks=ranks, parts=list(records), bytes=size))
        return Inventory(slots=slots, problems=[], free=shutil.disk_usage(self.path).free)

    def newest_step(self) -> int:
        """The newest step of which anything is here, or 0."""
        return max((step for step, _, _ in self._candidates()), default=0)

    def check(self, known: Inventory, name: str, beat: Callable[[], None] = lambda: None) -> Inventory:
        """What is here without the damaged parts of a slot, which is checked. `beat`: called now and then meanwhile."""
        slots, problems = list(known.slots), list(known.problems)
        for place, slot in enumerate(slots):
            if slot.name == name:
                records = _records(self.path / name)
                damaged = _damaged(self.path / name, {rank: records[rank] for rank in slot.parts}, beat)
                problems += [f"step {slot.step}: {problem}" for problem in damaged.values()]
                slots[place] = replace(slot, parts=[rank for rank in slot.parts if rank not in damaged])
        return replace(known, slots=slots, problems=problems, checked=[*known.checked, name])

    def _candidates(self) -> Iterator[tuple[int, Path, dict[int, dict[str, Any]]]]:
        """The slots that hold anything, each with its records of the newest step in it, by rank."""
        for directory in self.path.glob("g*/slot-*"):
            if records := _records(directory):
                step = max(record["step"] for record in records.values())
                yield step, directory, {rank: one for rank, one in records.items() if one["step"] == step}


def newest(nodes: Sequence[Inventory], *, needs_room: bool = True) -> tuple[Slot | None, list[list[int]], list[str]]:
    """The newest slot of which some nodes together have every part; which parts each of them has; and why newer ones
    were not taken. `needs_room`: each node is to get all parts."""
    problems = list(chain.from_iterable(node.problems for node in nodes))
    found = {(slot.step, slot.name): slot for node in nodes for slot in node.slots}
    for key, slot in sorted(found.items(), reverse=True):
        parts = [[part for one in node.slots if (one.step, one.name) == key for part in one.parts] for node in nodes]
        there = set(chain.from_iterable(parts))
        if len(there) < slot.ranks:
            problems.append(f"step {slot.step} is there of {len(there)} of {slot.ranks} ranks")
        elif needs_room and any(
            slot.bytes * (slot.ranks - len(own)) > node.free for own, node in zip(parts, nodes, strict=True)
        ):
            problems.append(f"step {slot.step} is there, and a node has no room for the parts that it lacks")
        else:
            return slot, parts, problems
    return None, [], problems


def record_of(rank: int) -> str:
    """The name of what a rank says of its part."""
    return f"rank-{rank:05d}.json"


def write_manifest(slot: Path) -> None:
    """Make a slot that has every part a checkpoint."""
    replace_bytes(slot / MANIFEST_NAME, _manifest(list(_records(slot).values())).encode(), durable=False)


def save_parts(slot: Path, parts: Iterable[int], into: Path) -> None:
    """Copy parts of a slot into an unfinished checkpoint on disk; their records there have the digests of an archive.
    Raises OSError."""
    records = _records(slot)
    for rank in parts:
        for name in records[rank]["files"]:
            copy = Path(shutil.copyfile(slot / name, into / name))
            sync(copy)
            records[rank]["files"][name] = asdict(describe(copy))
        replace_bytes(into / record_of(rank), json.dumps(records[rank]).encode(), durable=False)


def publish_parts(run: LocalRun, first: str, last: str, ranks: int, tokenizer: Tokenizer | None) -> None:
    """Publish an unfinished checkpoint that `save_parts` has filled, with the run's tokenizer. `ranks`: whose parts it
    has. Raises OSError, also where parts are missing."""
    directory = run.path / first
    records = _records(directory)
    if len(records) < ranks:
        raise OSError(f"there are parts of {len(records)} of {ranks} ranks")
    write_manifest(directory)
    manifest = read_manifest(directory)
    for rank in records:
        (directory / record_of(rank)).unlink()
    if tokenizer is not None:
        files = {**manifest.files, **run.write_tokenizer(first, tokenizer.save)}
        manifest = replace(manifest, files=files, tokenizer=tokenizer.fingerprint)
    run.publish(first, last, replace(manifest, serial=next_serial(run.path)).to_json())
    run.point_to(last)


def keepers() -> Iterator[tuple[int, dict[str, Any]]]:
    """The rank of each keeper of this user on this machine, and what it has noted."""
    for path in (path for directory in job_directories(_PURPOSE) for path in directory.glob("keeper-*.lock")):
        with contextlib.suppress(OSError, ValueError):
            yield int(path.stem.rpartition("-")[2]), json.loads(path.read_bytes())


def make_room(path: Path, head: bytes, size: int) -> mmap.mmap:
    """A new file in memory, mapped. Its room is taken now: a page that does not come later would end the process."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, size)
        os.write(descriptor, head)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise StorageError(
            f"--survive keeps two copies of the state in {path.parents[2]}, which has no room for {size:,} bytes more "
            f"({error.strerror}): leave --survive out, or give /dev/shm more memory (mount -o remount,size=...)"
        ) from None
    finally:
        os.close(descriptor)


def _take(descriptor: int, size: int) -> None:
    """Take room; what an older generation had may go only now (`remove_older`, on another rank)."""
    deadline = time.monotonic() + _SECONDS_FOR_ROOM
    while True:
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def remove_older(directory: Path, generation: int, *, kept: str | None = None) -> None:
    """Remove what generations before this one have left in a node's memory, but for the slot `kept`."""
    for slot in directory.glob("g*/slot-*"):
        is_older = (found := _GENERATION.fullmatch(slot.parent.name)) and int(found[1]) < generation
        if is_older and slot != directory / (kept or ""):
            shutil.rmtree(slot, ignore_errors=True)


def _remove_unless_kept(directory: Path) -> None:
    """Remove a memory, unless a keeper of it lives: each shares the lock of the directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            take_lock(descriptor)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _records(slot: Path) -> dict[int, dict[str, Any]]:
    """What the ranks say of their parts, by rank."""
    records = {}
    for path in sorted(slot.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError):
            records[int(path.stem.rpartition("-")[2])] = json.loads(path.read_bytes())
    return records


def _damaged(directory: Path, records: Mapping[int, Mapping[str, Any]], beat: Callable[[], None]) -> dict[int, str]:
    """What is wrong with the parts of some ranks, by rank."""

    def check(record: Mapping[str, Any]) -> str:
        try:
            for name, entry in record["files"].items():
                verify(directory / name, FileEntry(**entry))
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets go of the interpreter's lock
        looks = {rank: threads.submit(check, record) for rank, record in records.items()}
        while wait(looks.values(), timeout=0.5).not_done:
            beat()
        return {rank: problem for rank, look in looks.items() if (problem := look.result())}


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
