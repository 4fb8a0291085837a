"""Before a model is built: whether each rank's device, and its machine, have the memory that the run needs.

The formulas are those of `megacore.plan`; without an accelerator they have refused the run before torch was loaded. The
ranks agree before any of them allocates: one has not enough, and all end with its message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacore.config import ResolvedConfig
from megacore.errors import ConfigError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.plan.fit import device_problem, host_problem, offload_problem
from megacore.plan.memory import PlannedLayer
from megacore.plan.room import Room


def check_memory_of_ranks(config: ResolvedConfig, mesh: Mesh, layers: Sequence[PlannedLayer]) -> None:
    """Refuse a run that does not fit, on all ranks alike.

    Args:
        config: a resolved configuration.
        mesh: this rank's place.
        layers: the whole model.

    Raises:
        ConfigError: what a rank's device or machine lacks, and what would fit.
    """
    if not config.training.memory_check:
        return
    problems = all_gather_objects(_problem(config, mesh, layers), mesh.world)
    for number, problem in enumerate(problems):
        if problem is not None:
            where = f" (rank {number}: {mesh.describe(number)})" if mesh.world.size > 1 else ""
            raise ConfigError([problem + where])


def _problem(config: ResolvedConfig, mesh: Mesh, layers: Sequence[PlannedLayer]) -> str | None:
    if mesh.device.type == "cpu":
        return host_problem(config, layers)
    room = device_room(mesh.device)
    if room is not None and (problem := device_problem(config, layers, mesh.pipeline.rank, room)):
        return problem
    return offload_problem(config, layers) if config.parallel.offload_optimizer else None


def device_room(device: torch.device) -> Room | None:
    """What an accelerator has left for this process: what nobody holds, and what this process's allocator keeps unused;
    None where torch cannot say."""
    ask = getattr(torch.accelerator, "get_memory_info", None) or getattr(
        torch.get_device_module(device), "mem_get_info", None
    )
    try:
        free, total = ask(device)  # type: ignore[misc]
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return Room(float(free + max(unused, 0)), f"free on {device}, which has {total / 2**30:,.1f} GiB")
