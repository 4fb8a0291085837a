"""Whether a run fits into memory, before anything is allocated.

A run is refused for what is certain: its state, and most of the activations in flight. It is warned of where what is
expected is more than there is. Both are estimates of memory.py; suggestions.py says what would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megacore.config import ResolvedConfig
from megacore.config.dimensions import coordinates_of, pipeline_dimension
from megacore.config.messages import counted
from megacore.config.nodes import launcher_number
from megacore.errors import ConfigError
from megacore.models.outline import ModelLayer, outline
from megacore.parallel.host_memory import AvailableMemory, host_memory
from megacore.parallel.processors import computes_on_cpu
from megacore.plan.memory import RankMemory, plan_memory
from megacore.plan.state import whole_parameters
from megacore.plan.suggestions import Limits, size_text, suggestions

_TRY_ANYWAY = "--no-memory-check starts the run all the same"


# ---- the check -------------------------------------------------------------------------------------------------------


def check_memory(config: ResolvedConfig) -> None:
    """Refuse a run on a machine without an accelerator whose host memory it cannot fit into; before torch is loaded.

    Where there may be an accelerator, `megacore.train.memory_check` asks it later.

    Raises:
        ConfigError: it does not fit; with what it needs and what would fit.
    """
    on_cpu = computes_on_cpu(config.parallel.device)
    if not on_cpu or config.model.vocab_size is None or not config.training.memory_check:
        return
    if problem := host_problem(config, outline(config)):
        raise ConfigError([problem])


def host_problem(
    config: ResolvedConfig,
    layers: Sequence[ModelLayer],
    *,
    memory: AvailableMemory | None = None,
    torch_is_loaded: bool = False,
) -> str | None:
    """Why the ranks of this machine, which compute on its CPU, do not fit into its memory; None where they do.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        memory: None: what this machine says.
        torch_is_loaded: whether the machine says what it has left beside processes that have loaded torch.
    """
    memory = memory or host_memory()
    if memory is None:
        return None
    ranks = _ranks_here(config, layers, torch_is_loaded=torch_is_loaded)
    if sum(rank.certain for rank in ranks) <= memory.available:
        return None
    limits = Limits(memory=memory, on_cpu=True, local_ranks=len(ranks), torch_is_loaded=torch_is_loaded)
    return _message(config, layers, ranks, limits)


def host_warning(
    config: ResolvedConfig, layers: Sequence[ModelLayer], memory: AvailableMemory | None = None
) -> str | None:
    """That the ranks of this machine, which compute on its CPU with torch loaded, may need more than it has left."""
    ranks = _ranks_here(config, layers, torch_is_loaded=True)
    return _warning(config, layers, sum(rank.expected for rank in ranks), memory or host_memory())


def _ranks_here(config: ResolvedConfig, layers: Sequence[ModelLayer], *, torch_is_loaded: bool) -> Sequence[RankMemory]:
    ranks = plan_memory(config, layers, on_cpu=True, torch_is_loaded=torch_is_loaded)
    return [ranks[pp_rank] for pp_rank in pp_ranks_here(config)]


def device_problem(
    config: ResolvedConfig, layers: Sequence[ModelLayer], pp_rank: int, memory: AvailableMemory
) -> str | None:
    """Why a rank does not fit into its accelerator's memory; None where it does.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        pp_rank: the rank's number in its pipeline.
        memory: of the device.
    """
    rank = plan_memory(config, layers, on_cpu=False)[pp_rank]
    if rank.certain <= memory.available:
        return None
    local = len(pp_ranks_here(config))
    limits = Limits(memory=memory, host=host_memory(), host_ranks=local, on_cpu=False, local_ranks=local)
    return _message(config, layers, [rank], limits)


def device_warning(
    config: ResolvedConfig, layers: Sequence[ModelLayer], pp_rank: int, memory: AvailableMemory
) -> str | None:
    """That a rank may need more than its accelerator has left; arguments as for `device_problem`."""
    return _warning(config, layers, plan_memory(config, layers, on_cpu=False)[pp_rank].expected, memory)


def offload_problem(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> str | None:
    """Why what is offloaded does not fit into host memory; None where it does."""
    memory = host_memory()
    ranks = plan_memory(config, layers, on_cpu=False)
    needed = sum(ranks[pp_rank].on_host for pp_rank in pp_ranks_here(config))
    if memory is None or needed <= memory.available:
        return None
    taken, available = _told_apart(needed, memory.available)
    flags = " and ".join(config.offload_flags)
    return (
        f"{flags} needs {taken} of host memory for {counted(len(pp_ranks_here(config)), 'rank')} on this machine, but "
        f"{available} are available ({memory.source}): use --zero-stage 1 or more with a larger --dp, fewer ranks per "
        f"machine, or leave {flags} out; {_TRY_ANYWAY}"
    )


def pp_ranks_here(config: ResolvedConfig) -> list[int]:
    """The number in its pipeline of each rank that shares this process's machine, as the launcher numbers them."""
    world, degrees, pipeline = config.parallel.ranks, config.parallel.degrees, pipeline_dimension()
    rank, local = launcher_number("RANK", 0), launcher_number("LOCAL_RANK", 0)
    here = min(max(launcher_number("LOCAL_WORLD_SIZE", 1), 1), world)
    first = min(max(rank - local, 0), world - here)
    return [coordinates_of(rank, degrees)[pipeline] for rank in range(first, first + here)]


# ---- what is said ----------------------------------------------------------------------------------------------------


def _warning(
    config: ResolvedConfig, layers: Sequence[ModelLayer], expected: float, memory: AvailableMemory | None
) -> str | None:
    if memory is None or expected <= memory.available or not _describes(config, layers):
        return None
    needed, available = _told_apart(expected, memory.available)
    return f"tight: expected {needed} of {available} available ({memory.source}); see docs/guides/memory.md"


def _message(config: ResolvedConfig, layers: Sequence[ModelLayer], ranks: Sequence[RankMemory], limits: Limits) -> str:
    def total(part: Callable[[RankMemory], float]) -> float:
        return sum(map(part, ranks))

    training, memory = config.training, limits.memory
    name = f"--preset {config.model.preset}" if config.model.preset else "the model"
    where = "this machine" if limits.on_cpu else "the device"
    kinds = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer", "buffers": "copies for the host"}
    sums = {label: sum(rank.state[kind] for rank in ranks) for kind, label in kinds.items()}
    state = ", ".join(f"{label} {size_text(size)}" for label, size in sums.items() if size)
    needed, available = _told_apart(total(lambda rank: rank.certain), memory.available)
    lines = [
        f"{name} needs at least {needed} of memory for {counted(len(ranks), 'rank')} on {where}, "
        f"but {available} are available ({memory.source}):",
        f"  model        {whole_parameters(config, layers) / 1e6:,.2f}M parameters in {config.precision.precision}, "
        f"{max(rank.parameters for rank in ranks) / 1e6:,.2f}M of them on the fullest rank",
        f"  state        {size_text(sum(sums.values()))}: {state}"
        + (f"; of it {size_text(total(lambda rank: rank.on_host))} in host memory" if ranks[0].on_host else ""),
    ]
    if not _describes(config, layers):  # PipelineEngine's
        return "\n".join([*lines, "memory_check=False starts the run all the same"])
    lines += [
        f"  activations  {size_text(total(lambda rank: rank.activations + rank.working))}: "
        f"{counted(max(rank.in_flight for rank in ranks), 'microbatch', 'microbatches')} of "
        f"{training.micro_batch_size} x {config.data.seq_length} tokens in flight, --recompute {training.recompute}",
        "each of these is expected to fit (docs/guides/memory.md):",
    ]
    lines += [f"  {number}. {way}" for number, way in enumerate(suggestions(config, limits), start=1)]
    return "\n".join([*lines, _TRY_ANYWAY])


def _told_apart(more: float, less: float) -> tuple[str, str]:
    """Two sizes as texts that differ, in MiB where GiB would read the same."""
    if (texts := (size_text(more), size_text(less)))[0] != texts[1]:
        return texts
    return f"{more / 2**20:,.2f} MiB", f"{less / 2**20:,.2f} MiB"


def _describes(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> bool:
    """Whether the layers are those of the configuration, so that it is known what other flags would make of them."""
    names = [layer.name for layer in layers]
    return config.model.vocab_size is not None and names == [layer.name for layer in outline(config)]
