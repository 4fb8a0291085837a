"""Keeps a rank's part of the state in the memory of its node, after each update: a copy into mapped files, their XXH3,
and a record (copies.py). Nothing is gathered: what ZeRO divides, each rank writes as it has it, in at most a few
rectangular blocks per parameter; replicas of the same share their writing out."""

from __future__ import annotations

import json
import math
import mmap
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megacore.checkpoint.manifest import Manifest, sections_as_dicts
from megacore.checkpoint.state import BUFFERS, WEIGHTS, TrainingState, spec_of_state
from megacore.checkpoint.tensor_file import NAMES
from megacore.checkpoint.tensor_header import header_of
from megacore.config.optimizers import StateKind
from megacore.errors import PeerFailed, StorageError
from megacore.files import replace_bytes
from megacore.parallel.collectives import all_or_none, barrier
from megacore.parallel.mesh import Mesh, ReplicaRole, host_group
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.survive.copies import NO_SHA256, SLOTS, make_room, record_of, remove_older
from megacore.survive.meeting import Plan
from megacore.survive.peers import PeerCopies
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Block:
    """A rectangular part of a global tensor, as this rank has it."""

    kind: str
    name: str
    shape: tuple[int, ...]  # of the global tensor
    where: Slices  # in it
    number: int  # of the blocks of this tensor on this rank: a file holds one of a name
    tensor: Tensor


class StateInMemory(Callback):
    """Writes the state of a trainer into a node's memory, and into that of another node if there is one.

    Args:
        trainer: whose state it is.
        directory: of this node's memory.
        generation: of the run, whose older ones are removed once this one has a whole step.
        interval: steps from one state that is kept to the next.
        nodes: the number of the node of each rank.
    """

    def __init__(self, trainer: Trainer, directory: Path, generation: int, interval: int, nodes: Sequence[int]) -> None:
        rank = trainer.mesh.world.rank
        self._is_first_of_node = nodes.index(nodes[rank]) == rank
        self._peers = PeerCopies(host_group(trainer.mesh, trainer.config.parallel), nodes) if max(nodes) else None
        self._trainer, self._interval, self._written, self._nodes = trainer, interval, 0, max(nodes) + 1
        self._memory, self._generation = directory, generation
        self._slots = [directory / f"g{generation}" / f"slot-{number}" for number in range(SLOTS)]
        self._files: list[dict[str, mmap.mmap]] = [{} for _ in range(SLOTS)]
        self._targets: list[list[Tensor] | None] = [None] * SLOTS  # None: not prepared; a rank may have no block
        self._tables, self._has_room, self._kept = "", True, -1
        self.seconds = 0.0  # that it has taken so far

    def on_step_begin(self, run: Run, step: int) -> None:
        """Keep the state after the last step. Only now: what was logged, evaluated and saved of that step is done, so
        that a run which continues from here repeats nothing of it."""
        if not (self._written and self._trainer.step % self._interval):
            self.keep()

    def keep(self) -> bool:
        """Keep the state of now; whether memory has it."""
        trainer = self._trainer
        # A state whose last steps were skipped is not complete without what the run knows of them.
        if trainer.update.skipped_in_a_row or not self._has_room:
            return False
        if self._kept == trainer.step:
            return True
        begun = time.monotonic()
        if self._peers is not None:
            self._peers.finish()
        if self._written == 1 and self._is_first_of_node:
            remove_older(self._memory, self._generation)  # every rank has written the first: it took part in a step
        self._write(trainer.state())
        self._kept = trainer.step
        self.seconds += time.monotonic() - begun
        return self._has_room

    def on_stop(self, run: Run, reason: str | None) -> None:
        if self._peers is not None:
            self._peers.finish()  # else the rank that waits for this part finds this one gone

    @torch.no_grad()
    def _write(self, state: TrainingState) -> None:
        mesh, number = self._trainer.mesh, self._written % SLOTS
        slot, record = self._slots[number], record_of(mesh.world.rank)
        (slot / record).unlink(missing_ok=True)
        blocks = list(blocks_of(state, mesh))
        if (targets := self._targets[number]) is None:
            if (targets := self._prepare(slot, number, blocks)) is None:
                self._has_room = False
                return
            if number == 0:
                self._say_what_is_held()
        for block, target in zip(blocks, targets, strict=True):
            target.copy_(block.tensor)
        digests = {name: xxhash.xxh3_128(memory).hexdigest() for name, memory in self._files[number].items()}
        files = {
            name: {"bytes": len(memory), "sha256": NO_SHA256, "xxh3_128": digests[name]}
            for name, memory in self._files[number].items()
        }
        manifest = asdict(
            Manifest(
                step=state.step,
                consumed_samples=state.consumed_samples,
                counters=state.counters,
                series=state.series,
                topology=dict(mesh.degrees),
                config=sections_as_dicts(self._trainer.config) if mesh.world.is_first else {},
            )
        )
        del manifest["tensors"]
        text = json.dumps({**manifest, "files": files, "ranks": mesh.world.size})
        content = f'{text[:-1]}, "tensors": {self._tables}}}'.encode()
        replace_bytes(slot / record, content, durable=False)
        if self._peers is not None:
            self._peers.start(slot, content, self._files[number])
        self._written += 1

    def _say_what_is_held(self) -> None:
        held, after = sum(map(len, self._files[0].values())), ""
        if self._peers is not None:
            held += sum(map(len, self._peers.rooms.values()))
            left = self._nodes - 1  # each has the whole step then, its part of the next, and that of the node before
            lost = self._peers.step * (1 + min(2, left) / left) / 2**20
            after = f"; of a node after the loss of another: {lost:,.1f}"
        size = SLOTS * held / 2**20
        self._trainer.say(f"  {'survive':<10}keeps two steps in {self._memory}, MiB of rank 0: {size:,.1f}{after}")

    def _prepare(self, slot: Path, number: int, blocks: list[Block]) -> list[Tensor] | None:
        """Make the files of a slot, with room in memory, and find where each block goes; all ranks call this. Where a
        generation after a failure finds no room, the step that it continued from goes first, and else the next step is
        saved, and nothing more is kept: None. Raises StorageError where a run begins without room, or PeerFailed on the
        other ranks."""
        mesh, tables, files = self._trainer.mesh, dict[str, dict[str, object]](), dict[str, list[Block]]()
        for block in blocks:
            file = f"{block.kind}-{mesh.world.rank:05d}.{block.number}.safetensors"
            files.setdefault(file, []).append(block)
            entry = tables.setdefault(block.kind, {}).setdefault(
                block.name,
                {"shape": list(block.shape), "dtype": str(block.tensor.dtype).removeprefix("torch."), "pieces": []},
            )
            entry["pieces"].append(  # type: ignore[index]
                {"file": file, "start": [a for a, _ in block.where], "stop": [b for _, b in block.where]}
            )
        self._tables = json.dumps(tables)
        heads = {
            file: header_of({b.name: (NAMES[b.tensor.dtype], tuple(b.tensor.shape)) for b in members})
            for file, members in files.items()
        }
        sizes = {file: len(heads[file]) + sum(b.tensor.nbytes for b in members) for file, members in files.items()}
        arriving = self._peers.expected(sizes) if self._peers is not None else {}
        if (rooms := self._rooms(slot, heads, {**sizes, **arriving})) is None:
            if self._is_first_of_node:
                remove_older(self._memory, self._generation)
            barrier(mesh.world)
            rooms = self._rooms(slot, heads, {**sizes, **arriving})
        if rooms is None:
            self._trainer.say(
                f"  {'warning':<10}{self._memory} has no room for more copies of the state: the next step is saved, "
                "and a failure goes back to the last checkpoint; give /dev/shm more memory (mount -o remount,size=...)"
            )
            signal.raise_signal(signal.SIGUSR1)  # training handles it by now
            return None
        if self._peers is not None:
            self._peers.rooms |= {slot / name: rooms[name] for name in arriving}
        self._files[number] = {file: rooms[file] for file in files}
        targets: dict[tuple[str, str, int], Tensor] = {}
        for file, members in files.items():
            at = len(heads[file])
            for block in members:
                flat = torch.frombuffer(rooms[file], dtype=block.tensor.dtype, count=block.tensor.numel(), offset=at)
                targets[block.kind, block.name, block.number] = flat.view(block.tensor.shape)
                at += block.tensor.nbytes
        self._targets[number] = found = [targets[block.kind, block.name, block.number] for block in blocks]
        return found

    def _rooms(self, slot: Path, heads: Mapping[str, bytes], sizes: Mapping[str, int]) -> dict[str, mmap.mmap] | None:
        """New files of these sizes in memory; None, on all ranks, where one of them has no room."""
        mesh = self._trainer.mesh
        try:
            with all_or_none(mesh.world, mesh.device):
                slot.mkdir(parents=True, exist_ok=True)
                return {name: make_room(slot / name, heads.get(name, b""), size) for name, size in sizes.items()}
        except (StorageError, PeerFailed):
            for name in sizes:
                (slot / name).unlink(missing_ok=True)
            if not self._generation:
                raise
            return None


def blocks_of(state: TrainingState, mesh: Mesh) -> Iterator[Block]:
    """What this rank writes of a state: together the ranks write every element once."""
    loads: dict[ReplicaRole, list[int]] = {}  # elements that each of the ranks that have the same writes
    for local in state.data_parallel.segments:
        spec, bucket = local.spec, local.bucket
        role = spec.replica_role
        if not spec.is_counted_by(mesh) or local.segment.start == local.segment.stop:
            continue
        alike = mesh.replica_group(role) if bucket.options.stage == 0 else mesh.across_group(role)
        load = loads.setdefault(role, [0] * alike.size)
        for kind in (WEIGHTS, *state.optimizer.kinds):
            if not kind.exists(whole=local.spec.name in bucket.unsplit):
                continue
            writer = load.index(min(load))
            load[writer] += local.segment.stop - local.segment.start
            if writer != alike.rank:
                continue
            values = local.master if kind is WEIGHTS else state.optimizer.values(local, kind.name)
            if values is None and kind.first == "weights":
                values = local.master
            if kind.per != "element":
                of_state = spec_of_state(kind, spec)
                if values is None:
                    values = torch.zeros(math.prod(of_state.shape), dtype=getattr(torch, kind.dtype))
                whole = values.reshape(-1)[: math.prod(of_state.shape)].view(of_state.shape)
                yield Block(
                    kind=kind.name, name=spec.name, shape=of_state.shape, where=of_state.slices, number=0, tensor=whole
                )
                continue
            shape = next(tuple(p.shape) for p in bucket.parameters if p.spec.name == spec.name)
            if values is None:
                values = torch.zeros(local.segment.stop - local.segment.start, dtype=getattr(torch, kind.dtype))
            yield from _cut(kind, spec, shape, values.reshape(-1), local.segment.start)
    replicas = mesh.replicas
    if mesh.layer.is_first and mesh.copies.is_first and replicas.is_first:
        for name, buffer in state.buffers.items():
            if buffer.numel():
                where = tuple((0, size) for size in buffer.shape)
                yield Block(kind=BUFFERS, name=name, shape=tuple(buffer.shape), where=where, number=0, tensor=buffer)


def _cut(kind: StateKind, spec: ShardSpec, shape: tuple[int, ...], values: Tensor, start: int) -> Iterator[Block]:
    """The blocks of consecutive elements, from `start` on, of a local tensor of a shape, without its padding."""
    number = 0
    for first, last in rectangles(shape, start, start + len(values)):
        sizes = [b - a for a, b in zip(first, last, strict=True)]
        part = values[: math.prod(sizes)].view(sizes)
        values = values[math.prod(sizes) :]
        stops = [min(b, size) for b, size in zip(last, spec.local_shape, strict=True)]
        if any(a >= b for a, b in zip(first, stops, strict=True)):
            continue  # nothing but padding
        origin = [a for a, _ in spec.slices]
        where = tuple((o + a, o + b) for o, a, b in zip(origin, first, stops, strict=True))
        kept = part[tuple(slice(b - a) for a, b in zip(first, stops, strict=True))]
        yield Block(kind=kind.name, name=spec.name, shape=spec.shape, where=where, number=number, tensor=kept)
        number += 1


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """The elements [start, stop) of a tensor, in order, as blocks: the first index of each, and one past the last."""
    if not shape:
        yield [], []
        return
    row = math.prod(shape[1:])
    rest = list(shape[1:])
    while start < stop:
        number, within = divmod(start, row)
        if within or stop - start < row:  # a part of one row
            end = min(stop, (number + 1) * row)
            for first, last in rectangles(shape[1:], within, end - number * row):
                yield [number, *first], [number + 1, *last]
        else:
            end = stop // row * row
            yield [number, *[0] * len(rest)], [end // row, *rest]
        start = end


class Recovery(Callback):
    """Says what the failure before this generation has cost, after its first step, and passes on what was asked of the
    run meanwhile. `plan`: of the generation. `asked`: the signal that the keeper has for the run, or 0."""

    def __init__(self, plan: Plan, asked: Callable[[], int]) -> None:
        self._plan, self._asked, self._begun = plan, asked, time.time()
        self._is_due = bool(plan.cause)

    def on_step_begin(self, run: Run, step: int) -> None:
        if self._is_due:
            self._begun = time.time()
            for number in (signal.SIGUSR1 if self._plan.saves else 0, self._asked()):
                if number:
                    signal.raise_signal(number)  # training handles it by now (stopping.py)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if not self._is_due:
            return
        self._is_due, now = False, time.time()
        plan, step = self._plan, now - self._begun
        parts = {"seconds_agreed": plan.made - plan.at, "seconds_state": self._begun - plan.made, "seconds_step": step}
        kind, word = ("switch", "switched") if plan.asked else ("recovery", "recovered")
        run.emit(kind, cause=plan.cause, ranks=run.mesh.world.size, noticed=plan.at, **parts)
        run.say(f"  {word:<10}in {now - plan.at:.1f} s, of which step {result.step} took {step:.1f} s")
