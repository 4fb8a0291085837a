"""Before a model is built: whether each rank's device, and its machine, have the memory that the run needs.

The estimate is that of `megacore.plan`; without an accelerator they have refused the run before torch was loaded. The
ranks agree before any of them allocates: one has not enough, and all end with its message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megacore.config import ResolvedConfig
from megacore.errors import ConfigError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.plan.fit import device_problem, device_warning, host_problem, host_warning, offload_problem
from megacore.plan.room import Room
from megacore.plan.state import PlannedLayer


def check_memory_of_ranks(config: ResolvedConfig, mesh: Mesh, layers: Sequence[PlannedLayer]) -> str | None:
    """Refuse a run that does not fit, on all ranks alike.

    Args:
        config: a resolved configuration.
        mesh: this rank's groups.
        layers: the whole model.

    Returns:
        A line to print where a rank fits by what is certain, but not by what is expected; the same on all ranks.

    Raises:
        ConfigError: what a rank's device or machine lacks, and what would fit.
    """
    if not config.training.memory_check:
        return None
    verdicts = all_gather_objects(_verdict(config, mesh, layers), mesh.world)
    named = [verdict.and_rank(f" (rank {n}: {mesh.describe(n)})") for n, verdict in enumerate(verdicts)]
    named = named if mesh.world.size > 1 else verdicts
    for verdict in named:
        if verdict.problem is not None:
            raise ConfigError([verdict.problem])
    return next((verdict.warning for verdict in named if verdict.warning is not None), None)


def all_have_room(config: ResolvedConfig, mesh: Mesh, layers: Sequence[PlannedLayer]) -> bool:
    """Whether a run fits on every rank by what is expected; always without --memory-check. Arguments as for
    `check_memory_of_ranks`."""
    if not config.training.memory_check:
        return True
    verdict = _verdict(config, mesh, layers)
    return all(all_gather_objects(verdict == _Verdict(), mesh.world))


@dataclass(frozen=True)
class _Verdict:
    """Why a rank is refused, or a warning for it."""

    problem: str | None = None
    warning: str | None = None

    def and_rank(self, where: str) -> _Verdict:
        return _Verdict(self.problem and self.problem + where, self.warning and self.warning + where)


def _verdict(config: ResolvedConfig, mesh: Mesh, layers: Sequence[PlannedLayer]) -> _Verdict:
    if mesh.device.type == "cpu":
        problem = host_problem(config, layers, torch_is_loaded=True)
        return _Verdict(problem, None if problem else host_warning(config, layers))
    room, stage, problem = device_room(mesh.device), mesh.pipeline.rank, None
    if room is not None:
        problem = device_problem(config, layers, stage, room)
    if problem is None and (config.parallel.offload_optimizer or config.training.offload_activations):
        problem = offload_problem(config, layers)
    return _Verdict(problem, None if problem or room is None else device_warning(config, layers, stage, room))


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
