"""The copies of a run's state in memory (`--survive`): they hold the state of all ranks, and a damaged one is found."""

from __future__ import annotations

import mmap
import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.checkpoint.storage import LocalRun
from megacore.errors import StorageError
from megacore.files import replace_bytes
from megacore.models.outline import outline
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import build_mesh
from megacore.plan.memory import held_after_loss, held_on_host, plan_memory
from megacore.survive import peers, writer
from megacore.survive.copies import Inventory, NodeMemory, Slot, make_room, newest, publish_parts, save_parts
from megacore.survive.peers import complete
from megacore.survive.writer import StateInMemory, rectangles
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parallel.test_checkpoint import assert_equal, stored, whole_state
from tests.parity.runs import Layout, make_config, make_trainer


def begun(rank: int, layout: Layout, directory: str, /, node: str = "", **changes: Any) -> tuple[Trainer, NodeMemory]:
    """A trainer, and the memory of its node."""
    config = make_config(layout, directory, **{"micro_batch_size": 1, "global_batch_size": 4, **changes})
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": directory + node}
    return make_trainer(config, build_mesh(config.parallel)), NodeMemory(where, directory, rank)


def found_in(memory: NodeMemory) -> tuple[Slot | None, list[str]]:
    """The newest whole step of a node, which is checked, and why it has no newer one."""
    inventory = memory.inventory()
    while (slot := newest([inventory])[0]) and slot.name not in inventory.checked:
        inventory = memory.check(inventory, slot.name)
    return slot, newest([inventory])[2]


def save(slot: Path, parts: Sequence[Sequence[int]], run: Path, number: int) -> Path:
    """Save a slot of which each node, here one after the other, copies some parts; the checkpoint's directory."""
    storage, into = LocalRun(run), run / f"step_{number:08d}.tmp-0"
    into.mkdir(parents=True)
    for own in parts:
        save_parts(slot, own, into)
    publish_parts(storage, into.name, f"step_{number:08d}", sum(map(len, parts)), None)
    return run / f"step_{number:08d}"


# Of two tensors, so that a rank has nothing to write.
FEW: Any = {"lora_rank": 4, "lora_targets": "qkv_proj", "num_layers": 1, "optimizer": "sgd", "sgd_momentum": 0.0}
FEW |= {"global_batch_size": 6}
SLOW = [((1, 2, 2), {"zero_stage": 1}), ((4, 1, 1), {}), ((1, 1, 4), {"zero_stage": 2, "zero_shard_size": 2})]
LAYOUTS = [((2, 1, 2), {"zero_stage": 3}), ((1, 1, 3), FEW), *(pytest.param(*r, marks=pytest.mark.slow) for r in SLOW)]


def write(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    """Keep three steps, of which the memory has the last two, and compare the newest with the state of all ranks."""
    trainer, memory = begun(rank, layout, directory, **changes)
    state = StateInMemory(trainer, memory.path, 0, 1, [0] * world_size)
    for step in range(1, 4):
        trainer.train_step(next(trainer.batches))
        state.on_step_begin(trainer, step)
    expected = whole_state(trainer, trainer.mesh)
    if rank == 0:
        found, problems = found_in(memory)
        assert found is not None and (found.step, problems) == (3, [])
        if changes != FEW:  # which has fewer kinds
            assert_equal(
                stored(save(memory.path / found.name, [[0], range(1, world_size)], Path(directory), 3)), expected
            )
        for step, slot in ((2, "g0/slot-0"), (0, "g0/slot-1")):
            damaged = sorted((memory.path / slot).glob("model-*"))[-1]
            content = bytearray(damaged.read_bytes())
            content[-7] ^= 1 << 3
            damaged.write_bytes(content)
            whole, problems = found_in(memory)
            assert (whole.step if whole else 0) == step and any(damaged.name in problem for problem in problems)
    memory.leave()


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS)
def test_the_memory_holds_the_state_of_all_ranks(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    run_distributed(write, layout[0] * layout[1] * layout[2], layout, str(tmp_path), changes)


def crowd(rank: int, world_size: int, directory: str, *, may_go: bool) -> None:
    """Keep a step in a memory without room beside the one that the run has continued from, which may go, or at all:
    then the next step is saved."""
    trainer, memory = begun(rank, (1, 1, world_size), directory)

    def without_room(path: Path, head: bytes, size: int) -> mmap.mmap:
        if rank == 1 and (not may_go or (memory.path / "g0" / "slot-0").exists()):
            raise StorageError("no room")
        return make_room(path, head, size)

    asked = list[int]()
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    for generation in range(2):
        StateInMemory(trainer, memory.path, generation, 1, [0] * world_size).on_step_begin(trainer, 1)
        setattr(writer, "make_room", without_room)  # noqa: B010
        barrier(trainer.mesh.world)
    assert bool(asked) != may_go
    if rank == 0:
        assert getattr(found_in(memory)[0], "name", None) == ("g1/slot-0" if may_go else None)
    barrier(trainer.mesh.world)
    memory.leave()


@pytest.mark.parametrize("may_go", [True, False])
def test_a_recovery_without_room_for_copies_goes_on(may_go: bool, tmp_path: Path) -> None:
    run_distributed(partial(crowd, may_go=may_go), 2, str(tmp_path))


def share(rank: int, world_size: int, nodes: list[int], directory: str) -> None:
    """A node, which is a directory here, has its parts and those of the node before it; one without any gets all."""
    trainer, memory = begun(rank, (1, 1, world_size), directory, f"/{nodes[rank]}", zero_stage=3, survive=True)
    mesh, said = trainer.mesh, list[str]()
    setattr(trainer, "say", said.append)  # noqa: B010
    state = StateInMemory(trainer, memory.path, 0, 1, nodes)
    state.on_step_begin(trainer, 0)
    trainer.train_step(next(trainer.batches))
    expected = whole_state(trainer, mesh)
    barrier(mesh.world)

    def late(path: Path, content: bytes, *, durable: bool) -> None:
        time.sleep(1.0 if rank == world_size - 1 else 0.0)
        replace_bytes(path, content, durable=durable)

    setattr(peers, "replace_bytes", late)  # noqa: B010
    state.on_step_begin(trainer, 1)
    state.on_stop(trainer, None)
    found = all_gather_objects((memory.path, memory.inventory()), mesh.world)
    everywhere, last = list(dict(found).values()), max(nodes)
    for number, inventory in enumerate(everywhere):
        own = [r for r, node in enumerate(nodes) if node in (number, (number - 1) % (last + 1))]
        assert [slot.parts for slot in inventory.slots] == [own, own]
    if nodes == [0, 0, 1, 1]:  # what is planned is held, and said
        ranks = plan_memory(trainer.config, outline(trainer.config), on_cpu=False)
        held = sum(path.stat().st_size for path in memory.path.rglob("*.safetensors"))
        assert held == pytest.approx(held_on_host(trainer.config, ranks, 2), rel=0.03)
        assert float(said[-1].split()[-1]) == pytest.approx(held_after_loss(trainer.config, ranks, 2) / 2**20, rel=0.1)
        barrier(mesh.world)
    slot, parts, _ = newest([*everywhere[:-1], Inventory(slots=[], problems=[], free=1 << 30)])
    assert newest(everywhere[1:])[0] and slot is not None and not parts[-1]  # of the first, one node is lost
    if nodes.index(last) == rank:
        shutil.rmtree(memory.path / slot.name)
    barrier(mesh.world)
    complete(memory.path / slot.name, parts, nodes, mesh, trainer.config.parallel)
    if rank == 0:
        for path in dict(found):
            assert_equal(stored(path / slot.name), expected)
    barrier(mesh.world)
    memory.leave()


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], pytest.param([0, 1, 1, 2], marks=pytest.mark.slow)])
def test_nodes_keep_the_parts_of_one_another(nodes: list[int], tmp_path: Path) -> None:
    run_distributed(share, len(nodes), nodes, str(tmp_path))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_blocks_tile_any_range(shape: tuple[int, ...]) -> None:
    """Against numbers written out."""
    every = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start in range(every.size):
        for stop in range(start + 1, every.size + 1):
            blocks = [every[tuple(map(slice, a, b))].ravel() for a, b in rectangles(shape, start, stop)]
            assert np.concatenate(blocks).tolist() == list(range(start, stop))
