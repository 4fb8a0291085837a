"""The mesh: this rank's coordinates, its groups by role, and the only choice of device and backend.

The table of dimensions (`megacore.config.dimensions`) says how ranks are numbered and what each dimension divides. The
groups follow from it, and the rest of megacore asks for them by role (who splits this layer, whose losses add up) and
not by the name of a dimension. Nothing here is global: `build_mesh` returns a `Mesh`, which is passed down, and layers
get the one `Group` they need. A group of size 1 has no process group behind it and never communicates.
"""

from __future__ import annotations

import json
import math
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import count

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.config import ParallelConfig
from megacore.config.dimensions import (
    DIMENSIONS,
    EXPERT_ROLES,
    ROLES,
    Dimension,
    coordinates_of,
    degrees_of,
    describe_rank,
    fill_degrees,
    named_degrees,
)
from megacore.config.messages import counted, ranks_in_words
from megacore.config.nodes import launcher_number, torchrun_flags
from megacore.errors import ConfigError
from megacore.parallel import gloo
from megacore.parallel.heartbeat import Phase, phase, post
from megacore.parallel.processors import take_long_turns


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate with each other, and this rank's position among them."""

    ranks: tuple[int, ...] = (0,)  # global ranks of the members, in group order
    rank: int = 0  # this rank's position in `ranks`
    handle: dist.ProcessGroup | None = None  # the torch process group; None when the group has one member
    name: str = ""  # torch's name of it, by which compiled code refers to it
    size: int = field(init=False, repr=False, compare=False)  # number of members
    is_first: bool = field(init=False, repr=False, compare=False)  # whether this rank is the first member
    is_last: bool = field(init=False, repr=False, compare=False)  # whether this rank is the last member

    def __post_init__(self) -> None:
        size = len(self.ranks)
        for name, value in {"size": size, "is_first": self.rank == 0, "is_last": self.rank == size - 1}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Holders:
    """The ranks of a pipeline that hold copies of one tied parameter; they have no separate communicator."""

    pipeline: Group  # the pipeline group
    positions: tuple[int, ...]  # of the holders in the pipeline group, ascending; this rank's is among them

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.pipeline.ranks[position] for position in self.positions)


ALONE = Group()
_STORE_PATIENCE = timedelta(seconds=2)
_MEETINGS = count()

ReplicaRole = str
"""The role of a group that holds copies of a parameter and sums its gradients: the name of a group of `Mesh`."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's device, coordinates and groups by role."""

    device: torch.device  # where this rank's tensors live
    dimensions: Sequence[Dimension] = DIMENSIONS  # the table, outermost first
    # The number of ranks along each dimension, by name, outermost first.
    degrees: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys((d.name for d in DIMENSIONS), 1))
    world: Group = ALONE
    layer: Group = ALONE  # ranks that split the same matrices
    sequence: Group = ALONE  # ranks that take different positions of the same sequences
    pipeline: Group = ALONE  # ranks that hold consecutive stages of the model
    batch: Group = ALONE  # ranks that take different samples
    loss: Group = ALONE  # ranks whose partial losses and token counts add up to those of the global batch
    replicas: Group = ALONE  # ranks that hold the same parameters and sum their gradients; ZeRO divides state over them
    # Those of `replicas` that shard state among themselves; all, unless --zero-shard-size says otherwise.
    shards: Group = ALONE
    across: Group = ALONE  # ranks of `replicas` that hold copies of the same shards
    copies: Group = ALONE  # ranks that repeat each other's work on the same samples; the first of them counts and saves
    expert_replicas: Group = ALONE  # `replicas` of the parameters of experts
    dispatch: Group = ALONE  # ranks that hold different experts, and send each other the tokens that use them
    expert_layer: Group = ALONE  # ranks that split the same experts

    @property
    def backend(self) -> str:
        return "none (one process)" if self.world.size == 1 else dist.get_backend()

    @cached_property
    def sum_groups(self) -> tuple[Group, ...]:
        """Groups over which a sum, one after the other, is a sum over all ranks; none on one process."""
        return tuple(group for group in (self.replicas, self.layer, self.pipeline, self.copies) if group.size > 1)

    def replica_group(self, role: ReplicaRole) -> Group:
        """The holders of a parameter's copies, by role."""
        group: Group = getattr(self, role)
        return group

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a global rank along each dimension, by name."""
        return coordinates_of(rank, self.degrees)

    def describe(self, rank: int) -> str:
        """A global rank's coordinates in words: `pp 1, dp 0, tp 3`."""
        return describe_rank(rank, self.degrees)

    def shard_group(self, role: ReplicaRole) -> Group:
        """The part of `replica_group` over which ZeRO shards."""
        return self.shards if role == "replicas" else self.replica_group(role)

    def across_group(self, role: ReplicaRole) -> Group:
        """The part of `replica_group` that holds copies of the same shards."""
        return self.across if role == "replicas" else ALONE

    @property
    def file_label(self) -> str:
        """For names of files with parameters: `pp0-tp3` for a slice's first replica, `pp0-tp3-dp1` for another one."""
        coordinates = self.coordinates(self.world.rank)
        model = [d.name for d in self.dimensions if d.divides in ("stages", "matrices")]
        others = [name for name, number in coordinates.items() if name not in model and number]
        return "-".join(f"{name}{coordinates[name]}" for name in (*model, *others))


def world_size() -> int:
    """Number of ranks in the job, as the launcher (torchrun) states it; 1 without a launcher."""
    return launcher_number("WORLD_SIZE", 1, low=1)


def select_device(wanted: str) -> torch.device:
    """The device of this rank: the CPU, or the accelerator of its LOCAL_RANK.

    A launcher may let each process see one device only (srun --gpus-per-task 1): then it is that one, whatever the
    LOCAL_RANK. `join_job` refuses ranks that turn out to share it. `wanted`: `auto` (CUDA where there is one, else the
    CPU), `cpu`, or torch's name of an accelerator. Raises ConfigError where an accelerator is asked for that this
    machine lacks, or more ranks run here than it has devices.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "auto":
        wanted = "cuda" if accelerator is not None and accelerator.type == "cuda" else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != wanted:
        available = accelerator.type if accelerator else "none"
        raise ConfigError(
            [f"--device {wanted}: torch finds no such device here (accelerator: {available}); use --device cpu or auto"]
        )
    local_rank, count = launcher_number("LOCAL_RANK", 0), torch.accelerator.device_count()
    if local_rank >= count > 1:
        raise ConfigError(
            [
                f"--device {wanted}: local rank {local_rank}, but this process sees {count} devices: "
                f"start at most {count} ranks per node, let each rank see a different device, or use --device cpu"
            ]
        )
    index = local_rank if count > 1 else 0
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def multiplies_in_tf32() -> bool:
    """Whether products of fp32 matrices are in TF32. torch's older getter fails where the newer setting is used."""
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def may_share_memory(device: torch.device) -> bool:
    """Whether ranks on such devices of one node may read each other's memory: torch's symmetric memory."""
    return device.type == "cuda"


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies matrices faster in bf16 than in fp32, so that `--precision auto` chooses bf16. A
    CPU may have such instructions too, but most do not; NVIDIA's devices have them from compute capability 8.0."""
    if device.type == "cpu":
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    supports = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return supports is not None and bool(supports())


def compute_deterministically() -> None:
    """Make every operator give the same bits for the same input; to be called before the accelerator is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS may choose another algorithm each time
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before it is written; to fill it would be one more pass over each new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compute_reproducibly() -> None:
    """As `compute_deterministically`, on any layout. How many threads share an operator's work may show in what it
    rounds, so there is one, as the ranks of a parallel layout have anyway."""
    compute_deterministically()
    torch.set_num_threads(1)


def join_job(config: ParallelConfig) -> tuple[torch.device, Group]:
    """Join the job, unless this process has; a world of one process joins nothing. `config`: only its device and
    timeout are read. Returns this rank's device, and the group of all ranks. Raises ConfigError where the device that
    is asked for is not here, another rank has it too, or one of another kind."""
    if world_size() == 1 or dist.is_initialized():
        device = select_device(config.device)
    else:
        timeout, rank = _timeout(config), launcher_number("RANK")
        with phase(Phase.CONNECT):
            store = _job_store(timeout)
        with post(Phase.MEET, tuple(range(world_size())), 0):
            device = agree_on_devices(store, rank, world_size(), partial(select_device, config.device))
            if device.type == "cpu":
                gloo.prepare()
                take_long_turns()
            dist.init_process_group(
                dist.get_default_backend_for_device(device),
                timeout=timeout,
                store=store,
                rank=rank,
                world_size=world_size(),
                device_id=device if device.type != "cpu" else None,
            )
    if world_size() == 1:
        return device, ALONE
    return device, _group(dist.group.WORLD, dist.get_rank(), tuple(range(dist.get_world_size())))


def build_mesh(config: ParallelConfig, dimensions: Sequence[Dimension] = DIMENSIONS) -> Mesh:
    """Join the job and make the groups of this rank. `config`: the degrees. One that is None follows from the number of
    processes. Raises ConfigError where the product of the degrees is not the number of processes; or this rank's device
    does not exist, is also that of another rank, or is of another kind than the other ranks' devices."""
    degrees = {name: max(1, degree) for name, degree in fill_degrees(config, world_size(), dimensions).items()}
    if (needed := math.prod(degrees.values())) != world_size():
        equation = " x ".join(f"{name} {degree}" for name, degree in named_degrees(degrees).items())
        raise ConfigError(
            [
                f"{equation} = {needed}, but the run has {counted(world_size(), 'process', 'processes')}: use torchrun "
                f"{torchrun_flags(needed)}, or degrees whose product is {world_size()}"
            ]
        )
    device, world = join_job(config)
    return _mesh_of(device, world, dimensions, degrees, config)


def fake_mesh(
    config: ParallelConfig,
    dimensions: Sequence[Dimension] = DIMENSIONS,
    *,
    rank: int = 0,
    device: torch.device | None = None,
) -> Mesh:
    """The mesh of one rank of a job of which no other rank exists, for a step on fake tensors: what it receives has the
    right shape and no values. The process belongs to that job until `leave_fake_mesh`. `config`: the degrees; one that
    is None is 1. `rank`: which rank of the job. `device`: of its tensors; None: the CPU."""
    degrees = degrees_of(lambda field: getattr(config, field) or 1, dimensions)
    device, ranks = device or torch.device("cpu"), math.prod(degrees.values())
    if ranks == 1:
        return Mesh(device=device, dimensions=dimensions, degrees=degrees)
    if device.type not in (known := dist.Backend.backend_capability["fake"]):
        known.append(device.type)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    world = _group(dist.group.WORLD, rank, tuple(range(ranks)))
    return _mesh_of(device, world, dimensions, degrees, config)


def leave_fake_mesh(mesh: Mesh) -> None:
    """End the job of `fake_mesh`."""
    if mesh.world.size > 1:
        dist.destroy_process_group()


def _mesh_of(
    device: torch.device,
    world: Group,
    dimensions: Sequence[Dimension],
    degrees: Mapping[str, int],
    config: ParallelConfig,
) -> Mesh:
    """The groups of this rank, which all ranks of the world make together."""
    if world.size == 1:
        return Mesh(device=device, dimensions=dimensions, degrees=degrees)
    made: dict[tuple[tuple[int, ...], ...], Group] = {}
    groups = {role: groups_of_role(role, dimensions, degrees) for role in ROLES}
    if config.ep == 1 and config.expert_split == config.tp:
        alone = tuple((rank,) for rank in world.ranks)
        groups |= {"expert_replicas": groups["replicas"], "dispatch": alone, "expert_layer": groups["layer"]}
    else:
        split = config.ep, config.expert_split
        groups |= {role: groups_of_experts(role, dimensions, degrees, split) for role in EXPERT_ROLES}
    size = config.zero_shard_size or len(groups["replicas"][0])
    groups["shards"] = tuple(ranks[i : i + size] for ranks in groups["replicas"] for i in range(0, len(ranks), size))
    groups["across"] = tuple(ranks[i::size] for ranks in groups["replicas"] for i in range(size))
    with post(Phase.MEET, world.ranks, 0):
        for ranks in groups.values():
            if ranks not in made:
                made[ranks] = _join(ranks, world, device, _timeout(config))
    roles = {role: made[ranks] for role, ranks in groups.items()}
    return Mesh(device=device, dimensions=dimensions, degrees=degrees, world=world, **roles)


def groups_of_role(
    role: str, dimensions: Sequence[Dimension], degrees: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    """The global ranks of all groups of a role; a group over several dimensions is flattened, outermost first. `role`:
    an attribute of `Mesh`. `degrees`: ranks along each of them, by name."""
    sizes = [degrees[dimension.name] for dimension in dimensions]
    axes = [axis for axis, dimension in enumerate(dimensions) if dimension.divides in ROLES[role]]
    ranks = torch.arange(math.prod(sizes)).view(sizes).movedim(axes, tuple(range(-len(axes), 0)))
    return tuple(map(tuple, ranks.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()))


def groups_of_experts(
    role: str, dimensions: Sequence[Dimension], degrees: Mapping[str, int], split: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """The global ranks of all groups of a role of experts. `role`: one of `EXPERT_ROLES`. `degrees`: ranks along each
    of them, by name. `split`: ep and etp, whose product divides the ranks of a stage."""
    sizes = [degrees[dimension.name] for dimension in dimensions]
    axes = [a for a, d in enumerate(dimensions) if d.divides in ("samples", "tokens", "matrices")]
    block = math.prod(sizes[axis] for axis in axes)
    seen = (-1, block // math.prod(split), *split)
    ranks = torch.arange(math.prod(sizes)).view(sizes).movedim(axes, tuple(range(-len(axes), 0))).reshape(seen)
    along = 1 + EXPERT_ROLES[role]
    return tuple(map(tuple, ranks.movedim(along, -1).reshape(-1, ranks.shape[along]).tolist()))


def host_group(mesh: Mesh, config: ParallelConfig) -> Group:
    """All ranks again, for messages between the memories of their hosts, whatever their device; they make it together,
    and each time another one. `config`: only its timeout is read."""
    gloo.prepare()
    return _group(dist.new_group(backend="gloo", timeout=_timeout(config)), mesh.world.rank, mesh.world.ranks)


def _timeout(config: ParallelConfig) -> timedelta:
    return timedelta(minutes=config.distributed_timeout_minutes)


def _join(groups: Sequence[tuple[int, ...]], world: Group, device: torch.device, timeout: timedelta) -> Group:
    """Make all these groups together, every rank its own, and return this rank's."""
    ranks = next(group for group in groups if world.rank in group)
    if len(ranks) in (1, world.size):
        return _group(world.handle, world.rank, ranks)
    if _splits(device):
        handle = dist.split_group(split_ranks=[list(group) for group in groups], timeout=timeout)
    else:  # only its members call: what a rank does is independent of how many groups there are
        with gloo.few_threads(len(ranks)):
            handle = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return _group(handle, world.rank, ranks)


def _splits(device: torch.device) -> bool:
    """Whether the backend divides a communicator into several at once, as NCCL does one that is bound to a device."""
    world = dist.group.WORLD
    if device.type == "cpu" or world is None or getattr(world, "bound_device_id", None) is None:
        return False
    return bool(world._get_backend(device).supports_splitting)


def identity_of(device: torch.device) -> str | None:
    """What tells this device from every other one of the cluster; None where its kind has nothing of that sort."""
    if device.type == "cpu":
        return None
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = getattr(properties(device.index), "uuid", None) if properties is not None else None
    return None if uuid is None else str(uuid)


def agree_on_devices(store: dist.Store, rank: int, world_size: int, select: Callable[[], torch.device]) -> torch.device:
    """This rank's device, once every rank has one. This comes before the backends connect: two kinds of backend never
    do, and NCCL reports one device twice as an internal error. `world_size`: number of processes, which all call this.
    Raises ConfigError where a rank has no device, another kind of device, or that of another rank; on every rank."""
    device, problem = None, None
    try:
        device = select()
    except ConfigError as error:
        problem = "; ".join(error.problems)
    local = _Device(None, None, problem) if device is None else _Device(device.type, identity_of(device))
    store.set(f"device/{rank}", json.dumps(asdict(local)))
    if rank == 0:  # one reads what all have written: the store's traffic grows with the ranks, not with their square
        values = store.multi_get([f"device/{other}" for other in range(world_size)])
        store.set("device/problems", json.dumps(list(_unfit([_Device(**json.loads(value)) for value in values]))))
    if problems := json.loads(store.get("device/problems")):
        raise ConfigError(problems)
    assert device is not None
    return device


@dataclass(frozen=True)
class _Device:
    """The device of a rank: torch's name of its kind, an identity that differs between devices, or the problem."""

    kind: str | None
    identity: str | None
    problem: str | None = None
    host: str = field(default_factory=socket.gethostname)


def _unfit(devices: Sequence[_Device]) -> Iterator[str]:
    for problem, ranks in _alike(device.problem for device in devices):
        yield f"{problem} ({ranks_in_words(ranks)}, {devices[ranks[0]].host})"
    kinds = _alike(device.kind for device in devices)
    for kind, ranks in kinds[1:]:
        yield (
            f"{ranks_in_words(ranks)} would compute on {kind} (rank {ranks[0]} on {devices[ranks[0]].host}), "
            f"{ranks_in_words(kinds[0][1])} on {kinds[0][0]}: with --device auto a machine whose accelerator does not "
            "work takes its CPU; repair it or leave it out, or give every rank the same --device"
        )
    for name, ranks in _alike(device.identity and f"{device.identity} on {device.host}" for device in devices):
        if len(ranks) > 1:
            yield (
                f"{ranks_in_words(ranks)} have the same device, {name}: start no more ranks on a node than it has "
                "devices, with LOCAL_RANK as torchrun sets it or with one device bound to each "
                "(srun --gpus-per-task 1), or use --device cpu"
            )


def _alike(values: Iterable[str | None]) -> list[tuple[str, list[int]]]:
    """Each value with the ranks that have it; None is none."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return list(ranks.items())


def _job_store(timeout: timedelta) -> dist.Store:
    """The launcher's store. It may still hold where the ranks listened in an earlier attempt (torchrun --max-restarts),
    or before they left and joined again: each meeting has separate names. Every rank joins equally often."""
    store = _launchers_store(os.environ.get("MASTER_ADDR"), launcher_number("MASTER_PORT", low=1), timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megacore/attempt-{attempt}/meeting-{next(_MEETINGS)}", store)


@cache
def _launchers_store(address: str | None, port: int, timeout: timedelta) -> dist.Store:
    """Connected once per process: where a rank serves it, others may join again while that one still leaves."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        store: dist.Store = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
        return store
    assert address is not None
    return dist.TCPStore(address, port, timeout=timeout)


def serves_store() -> bool:
    """Whether the job's store ends with this process: without torchrun the first rank serves it."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return world_size() > 1 and not has_agent and os.environ.get("RANK") == "0"


def first_status_of_job(status: int) -> tuple[int, bool]:
    """The exit status that the first rank of the job to call this gave, and whether that was this call. The ranks ask
    the launcher's store, each on a separate connection: that of the process group may be waiting for a dead rank.
    `status`: with which this rank wants to end. Raises OSError, RuntimeError where there is no store to ask."""
    if world_size() == 1:
        return status, True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise OSError(f"no store: {error}") from error
    # The client of the store fills the terminal with C++ stacks where nobody listens any more.
    socket.create_connection((address, port), timeout=_STORE_PATIENCE.total_seconds()).close()
    store = dist.TCPStore(address, port, timeout=_STORE_PATIENCE, wait_for_workers=False)
    own = f"{status} {uuid.uuid4()}"  # a rank may ask twice, and is first only once
    first = store.compare_set(f"megacore/end/{attempt}", "", own).decode()
    return int(first.split()[0]), first == own


def lost_store(error: Exception) -> str | None:
    """That the store where the ranks meet is gone, where torch says so; None if it does not."""
    if not isinstance(error, dist.DistNetworkError):
        return None
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"lost the connection to the job's store at {where}: the process that serves it (torchrun, or without it rank "
        "0) has ended or cannot be reached; the first cause is in its output"
    )


def leave(mesh: Mesh) -> None:
    """Wait for all ranks, then leave the job in order."""
    if mesh.world.size > 1 and dist.is_initialized():
        with post(Phase.BARRIER, mesh.world.ranks, 0):
            dist.barrier()
            dist.destroy_process_group()


def _group(handle: dist.ProcessGroup | None, rank: int, ranks: tuple[int, ...]) -> Group:
    if handle is None or len(ranks) == 1:
        return Group(ranks=ranks, rank=ranks.index(rank))
    return Group(ranks=ranks, rank=ranks.index(rank), handle=handle, name=handle.group_name)
