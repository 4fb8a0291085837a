"""Before a model is built: whether each rank's device, and its machine, have the memory that the run needs. The
estimate is that of the planner (planning.py), which without an accelerator has refused the run before torch was loaded.
The ranks agree before any of them allocates: one has not enough, and all end with its message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacore.config import ResolvedConfig
from megacore.errors import ConfigError
from megacore.models.outline import ModelLayer
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.mesh import Mesh
from megacore.train.planning import MemoryVerdict, planner


def check_memory_of_ranks(config: ResolvedConfig, mesh: Mesh, layers: Sequence[ModelLayer]) -> str | None:
    """Refuse a run that does not fit, on all ranks alike. `layers`: the whole model. Returns a line to print where a
    rank fits by what is certain, but not by what is expected; the same on all ranks. Raises ConfigError with what a
    rank's device or machine lacks, and what would fit."""
    if not config.training.memory_check:
        return None
    verdicts = all_gather_objects(_verdict(config, mesh, layers), mesh.world)
    named = [verdict.of_rank(f" (rank {n}: {mesh.describe(n)})") for n, verdict in enumerate(verdicts)]
    named = named if mesh.world.size > 1 else verdicts
    for verdict in named:
        if verdict.problem is not None:
            raise ConfigError([verdict.problem])
    return next((verdict.warning for verdict in named if verdict.warning is not None), None)


def fits_everywhere(config: ResolvedConfig, mesh: Mesh, layers: Sequence[ModelLayer]) -> bool:
    """Whether a run is expected to fit on every rank; always without --memory-check. Otherwise as
    `check_memory_of_ranks`."""
    if not config.training.memory_check:
        return True
    verdict = _verdict(config, mesh, layers)
    return all(all_gather_objects(verdict == MemoryVerdict(), mesh.world))


def _verdict(config: ResolvedConfig, mesh: Mesh, layers: Sequence[ModelLayer]) -> MemoryVerdict:
    if mesh.device.type == "cpu":
        return planner().host_verdict(config, layers)
    return planner().device_verdict(config, layers, mesh.pipeline.rank, device_memory(mesh.device))


def device_memory(device: torch.device) -> AvailableMemory | None:
    """What an accelerator has left for this process, its allocator's unused part included; None where torch cannot
    say."""
    ask = getattr(torch.accelerator, "get_memory_info", None) or getattr(
        torch.get_device_module(device), "mem_get_info", None
    )
    try:
        free, total = ask(device)  # type: ignore[misc]
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return AvailableMemory(float(free + max(unused, 0)), f"free on {device}, which has {total / 2**30:,.1f} GiB")
