"""The mesh: every rank's place in the tensor x data x pipeline grid, and the only choice of device and backend.

Ranks are numbered with tp innermost (neighbouring ranks, the fastest links), then dp, and pp outermost, the layout of
Narayanan et al. 2021 (arXiv 2104.04473, section 3.3). Nothing here is global: `build_mesh` returns a `Mesh`, which
is passed down, and layers get the one `Group` they need. A group of size 1 has no process group behind it and never
communicates.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megacore.config import ResolvedParallel
from megacore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks along one dimension of the mesh, and this rank's place among them.

    Attributes:
        ranks: global ranks of the members, in group order.
        rank: this rank's position in `ranks`.
        handle: the torch process group; None when the group has one member.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


ALONE = Group()
_STORE_PATIENCE = timedelta(seconds=2)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's device and groups.

    Attributes:
        device: where this rank's tensors live.
        world: all ranks.
        tp: ranks that split the same layers (tensor parallel).
        dp: ranks that hold the same parameters and different data (data parallel).
        pp: ranks that hold consecutive stages of the same model replica (pipeline parallel).
    """

    device: torch.device
    world: Group = ALONE
    tp: Group = ALONE
    dp: Group = ALONE
    pp: Group = ALONE

    @property
    def backend(self) -> str:
        return "none (one process)" if self.world.size == 1 else dist.get_backend()

    def coordinates(self, rank: int) -> str:
        """The place of a global rank in words: `pp 1, dp 0, tp 3`."""
        tp, dp = self.tp.size, self.dp.size
        return f"pp {rank // (tp * dp)}, dp {rank // tp % dp}, tp {rank % tp}"


def world_size() -> int:
    """Number of ranks in the job, as the launcher (torchrun) states it; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def select_device(wanted: str) -> torch.device:
    """The device of this rank: the accelerator of its LOCAL_RANK when there is one and it is wanted, else the CPU.

    Raises:
        ConfigError: an accelerator is asked for that this machine lacks, or more ranks run here than it has devices.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "cpu" or (wanted == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or (wanted != "auto" and accelerator.type != wanted):
        found = accelerator.type if accelerator else "none"
        raise ConfigError(
            [f"--device {wanted}: torch finds no such device here (accelerator: {found}); use --device cpu or auto"]
        )
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if index >= count:
        raise ConfigError(
            [
                f"--device {wanted}: local rank {index}, but this machine has {count} device(s): "
                f"start at most {count} ranks a node, or use --device cpu"
            ]
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def compute_reproducibly() -> None:
    """Make every operator give the same bits for the same input; to be called before the accelerator is first used.

    How many threads share an operator's work may show in what it rounds, so there is one, as the ranks of a parallel
    layout have anyway.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS may choose another algorithm each time
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


def build_mesh(config: ResolvedParallel) -> Mesh:
    """Join the job and find this rank's place; a world of one process joins nothing.

    Args:
        config: the parallel section, resolved: tp x pp x dp is the world size.

    Raises:
        ConfigError: the device that is asked for is not here.
    """
    device = select_device(config.device)
    if world_size() == 1:
        return Mesh(device=device)
    if not dist.is_initialized():
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        store = _launchers_store(timeout)
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            timeout=timeout,
            store=store,
            rank=-1 if store is None else int(os.environ["RANK"]),
            world_size=-1 if store is None else world_size(),
            device_id=device if device.type != "cpu" else None,
        )
    grid = init_device_mesh(device.type, (config.pp, config.dp, config.tp), mesh_dim_names=("pp", "dp", "tp"))
    return Mesh(
        device=device,
        world=_group(dist.group.WORLD, dist.get_rank(), tuple(range(dist.get_world_size()))),
        tp=_dimension(grid, "tp"),
        dp=_dimension(grid, "dp"),
        pp=_dimension(grid, "pp"),
    )


def _launchers_store(timeout: timedelta) -> dist.Store | None:
    """torchrun's store, with names of this attempt alone: after a restart (--max-restarts) it may still hold where the
    ranks of the last one listened. None: the process group finds its store by itself."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    return dist.PrefixStore(f"megacore/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def is_first_of_job(event: str, *, otherwise: bool) -> bool:
    """Whether no other rank of the job has asked this before; true for exactly one of them.

    The ranks count in the launcher's store, each on a connection of its own: that of the process group may be waiting
    for a dead rank.

    Args:
        event: what is to happen once.
        otherwise: the answer where there is no store to ask.
    """
    if world_size() == 1:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The store's own client fills the terminal with C++ stacks where nobody listens any more.
        socket.create_connection((address, port), timeout=_STORE_PATIENCE.total_seconds()).close()
        store = dist.TCPStore(address, port, timeout=_STORE_PATIENCE, wait_for_workers=False)
        return store.add(f"megacore/{event}/{attempt}", 1) == 1
    except (KeyError, ValueError, OSError, RuntimeError):
        return otherwise


def leave(mesh: Mesh) -> None:
    """Wait for all ranks, then leave the job in order."""
    if mesh.world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _group(handle: dist.ProcessGroup | None, rank: int, ranks: tuple[int, ...]) -> Group:
    return Group(ranks=ranks, rank=ranks.index(rank), handle=handle if len(ranks) > 1 else None)


def _dimension(grid: DeviceMesh, name: str) -> Group:
    handle = grid.get_group(name)
    return _group(handle, dist.get_rank(), tuple(dist.get_process_group_ranks(handle)))


def along_pipeline(mesh: Mesh, members: Sequence[int]) -> Group:
    """Some ranks of this rank's pipeline as a group, such as the holders of a tied parameter.

    Every rank of the job makes every group, in the same order, whether it is in it or not.

    Args:
        mesh: this rank's place.
        members: positions in the pipeline, ascending.

    Returns:
        The group; one of this rank alone where it is not a member.
    """
    if len(members) == mesh.pp.size or len(members) == 1:
        return mesh.pp if len(members) > 1 else ALONE
    own, width = ALONE, mesh.tp.size * mesh.dp.size
    for column in range(width):
        ranks = [member * width + column for member in members]
        handle = dist.new_group(ranks)
        if mesh.world.rank in ranks:
            own = _group(handle, mesh.world.rank, tuple(ranks))
    return own
