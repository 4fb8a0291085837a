"""The memory that a run may take, on its devices and beside them, and what a configuration is expected to take."""

from __future__ import annotations

from dataclasses import dataclass

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.parallel.host_memory import AvailableMemory
from megacore.plan.cluster import Cluster
from megacore.plan.memory import GIB, MOST_MEMORY, fullest_rank, held_on_host, plan_memory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory that every check of a run compares with.

    Attributes:
        memory: of the device on which a rank computes; on a CPU all ranks of the machine share it.
        host: host memory beside the devices of a machine, for what is offloaded; None: not known.
        host_ranks: ranks that share it, where there are as many.
        on_cpu: whether the ranks compute on a CPU.
        local_ranks: ranks of each machine, in whole machines; 1: any number of ranks will do.
        torch_is_loaded: whether `memory` is what is left with torch loaded.
        cluster: by whose times --schedule auto chooses; None: not known, and figures are those of 1F1B.
    """

    memory: AvailableMemory
    host: AvailableMemory | None = None
    host_ranks: int = 1
    on_cpu: bool
    local_ranks: int = 1
    torch_is_loaded: bool = False
    cluster: Cluster | None = None

    def demand(self, config: ResolvedConfig) -> Demand:
        """What the fullest rank of a configuration is expected to take."""
        ranks = plan_memory(
            config,
            outline(config),
            on_cpu=self.on_cpu,
            torch_is_loaded=self.torch_is_loaded,
            copies_logits=self._copies_logits,
        )
        return Demand(
            computing=max(rank.expected for rank in ranks),
            on_host=max(rank.on_host for rank in ranks),
            on_node=held_on_host(config, ranks, self.host_ranks),
        )

    def allow(self, demand: Demand, *, ranks: int | None = None) -> bool:
        """Whether the device and the host have as much, of all ranks of a machine, or of `ranks` if that is all."""
        return demand.computing * self._sharing(ranks) <= self.memory.available and self.host_allows(demand)

    def hold_the_most(self, demand: Demand, *, ranks: int) -> bool:
        """Whether the device has as much as so many ranks may take at the most. Host memory has no range."""
        return MOST_MEMORY * demand.computing * self._sharing(ranks) <= self.memory.available

    def fits(self, config: ResolvedConfig) -> bool:
        """Whether all ranks of a configuration have what they are expected to take."""
        ranks = config.parallel.ranks
        if (self.host is not None and config.offloads) or self.torch_is_loaded:
            return self.allow(self.demand(config), ranks=ranks)
        most = self.memory.available / self._sharing(ranks)
        fullest = fullest_rank(
            config, outline(config), on_cpu=self.on_cpu, limit=most, copies_logits=self._copies_logits
        )
        return fullest.expected <= most

    @property
    def _copies_logits(self) -> bool:
        return self.cluster is not None and self.cluster.software.copies_logits

    def _sharing(self, ranks: int | None) -> int:
        """The ranks that share the memory, of all ranks of a machine, or of `ranks` if that is all."""
        local = self.local_ranks if ranks is None else min(ranks, self.local_ranks)
        return local if self.on_cpu else 1

    def host_allows(self, demand: Demand) -> bool:
        """Whether the host has as much as is offloaded."""
        return self.host is None or demand.on_node <= self.host.available


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the fullest rank is expected to take.

    Attributes:
        computing: bytes where it computes.
        on_host: bytes beside that in host memory.
        on_node: bytes in host memory of all ranks of a machine.
    """

    computing: float
    on_host: float
    on_node: float

    def __str__(self) -> str:
        beside = f" and {size_text(self.on_host)} of host memory" if self.on_host else ""
        return f"{size_text(self.computing)}{beside} per rank"


def size_text(size: float) -> str:
    """Bytes in GiB, or in the smaller unit that says something."""
    for unit, factor in (("GiB", GIB), ("MiB", 2.0**20)):
        if size >= factor or (unit == "MiB" and size >= factor / 10):
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1024:,.1f} KiB"
