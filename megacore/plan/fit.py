"""Whether a run fits into memory, before anything is allocated; where it does not, what would.

A run is refused for what is certain: a sum of tensors that all exist at one moment. What is recommended instead has
room for what is only expected as well. Both are computed by the formulas of memory.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config import ModelConfig, ResolvedConfig, validate
from megacore.config.dimensions import coordinates_of, pipeline_dimension
from megacore.config.fields import field_infos
from megacore.config.messages import counted
from megacore.errors import ConfigError
from megacore.plan.memory import GIB, PlannedLayer, RankMemory, plan_memory
from megacore.plan.outline import outline
from megacore.plan.room import Room, host_room

# What the drivers of NVIDIA, AMD and WSL put there where there is an accelerator.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_MOST_RANKS = 4096
_TRY_ANYWAY = "--no-memory-check starts the run all the same"

Ask = Callable[[ResolvedConfig], float]  # bytes that a configuration's fullest share of one room is expected to take


@dataclass(frozen=True)
class Change:
    """Another configuration, and the flags that make it of the given one."""

    config: ResolvedConfig
    flags: tuple[str, ...] = ()

    def and_(self, section: str, flag: str, **values: Any) -> Change:
        """With other values in a section."""
        changed = dataclasses.replace(getattr(self.config, section), **values)
        return Change(dataclasses.replace(self.config, **{section: changed}), (*self.flags, flag))


# ---- the check -------------------------------------------------------------------------------------------------------


def check_memory(config: ResolvedConfig) -> None:
    """Refuse a run on a machine without an accelerator whose host memory it cannot fit into; before torch is loaded.

    Where there may be an accelerator, `megacore.train.memory_check` asks it later.

    Raises:
        ConfigError: it does not fit; with what it needs and what would fit.
    """
    may_accelerate = config.parallel.device != "cpu" and any(map(os.path.exists, _DEVICE_FILES))
    if may_accelerate or config.model.vocab_size is None or not config.training.memory_check:
        return
    if problem := host_problem(config, outline(config)):
        raise ConfigError([problem])


def host_problem(config: ResolvedConfig, layers: Sequence[PlannedLayer], *, room: Room | None = None) -> str | None:
    """Why the ranks of this machine, which compute on its CPU, do not fit into its memory; None where they do.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        room: None: what this machine says.
    """
    room = room or host_room()
    if room is None:
        return None
    places = places_here(config)
    ranks = plan_memory(config, layers, on_cpu=True)
    if sum(ranks[place].certain for place in places) <= room.available:
        return None
    return _message(config, layers, [ranks[place] for place in places], room, on_cpu=True)


def device_problem(config: ResolvedConfig, layers: Sequence[PlannedLayer], place: int, room: Room) -> str | None:
    """Why a rank does not fit into its accelerator's memory; None where it does.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        place: the rank's place in the pipeline.
        room: of the device.
    """
    rank = plan_memory(config, layers, on_cpu=False)[place]
    return None if rank.certain <= room.available else _message(config, layers, [rank], room, on_cpu=False)


def offload_problem(config: ResolvedConfig, layers: Sequence[PlannedLayer], room: Room | None = None) -> str | None:
    """Why what `--offload-optimizer` keeps in host memory does not fit there; None where it does."""
    room = room or host_room()
    ranks = plan_memory(config, layers, on_cpu=False)
    needed = sum(ranks[place].on_host for place in places_here(config))
    if room is None or needed <= room.available:
        return None
    return (
        f"--offload-optimizer keeps {_gib(needed)} of this machine's {counted(len(places_here(config)), 'rank')} in "
        f"host memory, of which {_gib(room.available)} are available ({room.source}): use --zero-stage 1 or more with "
        f"a larger --dp, fewer ranks a machine, or leave --offload-optimizer out; {_TRY_ANYWAY}"
    )


def places_here(config: ResolvedConfig) -> list[int]:
    """The place in the pipeline of each rank that shares this process's machine, as the launcher numbers them."""
    world, degrees, pipeline = config.parallel.ranks, config.parallel.degrees, pipeline_dimension()
    rank, local = _variable("RANK", 0), _variable("LOCAL_RANK", 0)
    here = min(max(_variable("LOCAL_WORLD_SIZE", 1), 1), world)
    first = min(max(rank - local, 0), world - here)
    return [coordinates_of(rank, degrees)[pipeline] for rank in range(first, first + here)]


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


# ---- what is said ----------------------------------------------------------------------------------------------------


def _message(
    config: ResolvedConfig, layers: Sequence[PlannedLayer], ranks: Sequence[RankMemory], room: Room, *, on_cpu: bool
) -> str:
    def total(part: Callable[[RankMemory], float]) -> float:
        return sum(map(part, ranks))

    training, count = config.training, len(ranks)
    name = f"--preset {config.model.preset}" if config.model.preset else "the model"
    where = "this machine" if on_cpu else "the device"
    kinds = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer", "buffers": "copies for the host"}
    sums = {label: sum(rank.state[kind] for rank in ranks) for kind, label in kinds.items()}
    state = ", ".join(f"{label} {_gib(size)}" for label, size in sums.items() if size)
    lines = [
        f"{name} needs at least {_gib(total(lambda rank: rank.certain))} of memory for "
        f"{counted(count, 'rank')} on {where}, but {_gib(room.available)} are available ({room.source}):",
        f"  model        {whole_parameters(config, layers) / 1e6:,.2f}M parameters in {config.precision.precision}, "
        f"{max(rank.parameters for rank in ranks) / 1e6:,.2f}M of them on the fullest rank",
        f"  state        {_gib(sum(sums.values()))}: {state}"
        + (f"; of it {_gib(total(lambda rank: rank.on_host))} in host memory" if ranks[0].on_host else ""),
        f"  activations  {_gib(total(lambda rank: rank.activations + rank.working))}: "
        f"{counted(max(rank.in_flight for rank in ranks), 'microbatch', 'microbatches')} of "
        f"{training.micro_batch_size} x {config.data.seq_length} tokens in flight, --recompute {training.recompute}",
    ]
    if not _describes(config, layers):  # PipelineEngine's
        return "\n".join([*lines, "memory_check=False starts the run all the same"])
    if found := list(ways_out(config, room, on_cpu=on_cpu, sharing=count)):
        lines.append("ways out, with what a rank is expected to take by the same formulas (docs/memory.md):")
        lines += [f"  {number}. {text}" for number, text in enumerate(found, start=1)]
    return "\n".join([*lines, _TRY_ANYWAY])


def _describes(config: ResolvedConfig, layers: Sequence[PlannedLayer]) -> bool:
    """Whether the layers are those of the configuration, so that it is known what other flags would make of them."""
    names = [layer.name for layer in layers]
    return config.model.vocab_size is not None and names == [layer.name for layer in outline(config)]


def whole_parameters(config: ResolvedConfig, layers: Sequence[PlannedLayer]) -> int:
    """Of the whole model, a tied one counted once."""
    tables = config.model.vocab_size * config.model.hidden_size if config.model.vocab_size else 0
    tied = (tables if layer.held is not None else layer.shared for layer in layers if layer.tied)
    return sum(layer.parameters for layer in layers) - sum(tied)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


# ---- what would fit --------------------------------------------------------------------------------------------------


def ways_out(config: ResolvedConfig, room: Room, *, on_cpu: bool, sharing: int) -> Iterator[str]:
    """Other flags, more ranks, and a smaller model that fit into as much memory, each as a line to read.

    Args:
        config: a resolved configuration that does not fit.
        room: that the ranks have.
        on_cpu: whether they compute on a CPU.
        sharing: how many ranks share the room.
    """

    def asked(candidate: ResolvedConfig) -> float:
        return sharing * max(rank.expected for rank in plan_memory(candidate, outline(candidate), on_cpu=on_cpu))

    def first(candidates: Iterator[Change]) -> tuple[Change, float] | None:
        for change in candidates:
            world = change.config.parallel.ranks
            if not validate(change.config, world) and (size := asked(change.config)) <= room.available:
                return change, size / sharing
        return None

    if found := first(_savings(Change(config), on_cpu=on_cpu)):
        yield f"{' '.join(found[0].flags)}: {_gib(found[1])} a rank"
    for family in (_more_replicas, _more_stages):
        if found := first(family(config, sharing)):
            change, size = found
            world = change.config.parallel.ranks
            machines = f"{counted(world // sharing, 'machine')} with as much memory" if on_cpu else f"{world} devices"
            yield f"{' '.join(change.flags)}, on {machines}: {_gib(size)} a rank"
    if found := first(_smaller_models(config, on_cpu=on_cpu)):
        yield f"{' '.join(found[0].flags)}, a smaller model: {_gib(found[1])} a rank"


def _savings(start: Change, *, on_cpu: bool) -> Iterator[Change]:
    """The same ranks and model with flags that save memory, the fewest and gentlest first."""
    training, parallel, dp = start.config.training, start.config.parallel, start.config.parallel.dp
    kinds = ("none", "selective", "full")
    batch = training.global_batch_size // dp
    smaller = [m for m in (training.micro_batch_size // n for n in (2, 4, 8)) if m] + [1]
    groups: list[list[tuple[str, str, dict[str, Any]]]] = [
        [
            ("training", f"--recompute {kind}", {"recompute": kind})
            for kind in kinds[kinds.index(training.recompute) + 1 :]
        ],
        [
            ("training", f"--micro-batch-size {size}", {"micro_batch_size": size})
            for size in dict.fromkeys(smaller)
            if size < training.micro_batch_size and batch % size == 0
        ],
        [
            ("parallel", f"--zero-stage {stage}", {"zero_stage": stage})
            for stage in range(parallel.zero_stage + 1, 4 if dp > 1 else 0)
        ],
    ]
    if parallel.tp > 1 and not parallel.sequence_parallel:
        groups.append([("parallel", "--sequence-parallel", {"sequence_parallel": True})])
    if not on_cpu and not parallel.offload_optimizer:
        groups.append([("parallel", "--offload-optimizer", {"offload_optimizer": True})])
    if start.config.precision.precision == "fp32":
        groups.append([("precision", "--precision bf16", {"precision": "bf16"})])
    choices = itertools.product(*(range(len(group) + 1) for group in groups))
    for choice in sorted(choices, key=lambda chosen: (sum(map(bool, chosen)), sum(chosen))):
        change = start
        for group, number in zip(groups, choice, strict=True):
            if number:
                section, flag, values = group[number - 1]
                change = change.and_(section, flag, **values)
        if change is not start:
            yield change


def _thrifty(change: Change) -> Iterator[Change]:
    """The same, then with every activation that can be computed again, then with the smallest microbatch as well."""
    yield change
    if change.config.training.recompute != "full":
        change = change.and_("training", "--recompute full", recompute="full", recompute_num_layers=None)
        yield change
    if change.config.training.micro_batch_size > 1:
        yield change.and_("training", "--micro-batch-size 1", micro_batch_size=1)


def _more_replicas(config: ResolvedConfig, sharing: int) -> Iterator[Change]:
    """ZeRO stage 3 over more and more data-parallel ranks."""
    parallel, dp = config.parallel, config.parallel.dp
    while (dp := dp * 2) * parallel.tp * parallel.pp <= _MOST_RANKS:
        if dp * parallel.tp * parallel.pp % sharing == 0:
            for start in _thrifty(Change(config)):
                change = _with_batch(start, dp)
                yield change.and_("parallel", f"--dp {dp} --zero-stage 3", dp=dp, zero_stage=3)


def _more_stages(config: ResolvedConfig, sharing: int) -> Iterator[Change]:
    """The layers split over more and more ranks, by tp up to eight neighbours, and beyond by pp."""
    parallel = config.parallel
    if parallel.schedule_csv is not None or parallel.pipeline_layout is not None:
        return
    for ranks in (2**n for n in range(1, 9)):
        for start in _thrifty(Change(config)):
            for tp in (t for t in (8, 4, 2, 1) if ranks % t == 0):
                pp = ranks // tp
                grown = tp >= parallel.tp and pp >= parallel.pp and tp * pp > parallel.tp * parallel.pp
                if grown and tp * pp * parallel.dp % sharing == 0:
                    degrees = [f"--{name} {degree}" for name, degree in (("tp", tp), ("pp", pp)) if degree > 1]
                    yield start.and_("parallel", " ".join(degrees), tp=tp, pp=pp)


def _with_batch(change: Change, dp: int) -> Change:
    """A global batch that so many replicas can share: the given one, or one microbatch for each."""
    training = change.config.training
    batch = training.micro_batch_size * dp
    if training.global_batch_size % batch == 0:
        return change
    return change.and_("training", f"--global-batch-size {batch}", global_batch_size=batch)


def _smaller_models(config: ResolvedConfig, *, on_cpu: bool) -> Iterator[Change]:
    """The larger presets before the smaller ones; without a preset, fewer layers."""
    name = config.model.preset
    if name is None:
        layers = config.model.num_layers
        fractions = {layers * n // 8 for n in range(1, 8)} | {layers >> n for n in range(4, 16)}
        for fewer in sorted(fractions - {0}, reverse=True):
            change = Change(config).and_("model", f"--num-layers {fewer}", num_layers=fewer)
            yield from _thrifty(change)
        return
    if not _is_as_named(config, name):
        return  # the flags that change its shape would change another one's as well
    candidates = [_as_preset(config, other) for other in config.presets if other != name]
    sized = [(whole_parameters(c.config, outline(c.config)), c) for c in candidates if c is not None]
    own = whole_parameters(config, outline(config))
    for size, change in sorted(sized, key=lambda item: item[0], reverse=True):
        if size < own:
            yield from _thrifty(change)


def _as_preset(config: ResolvedConfig, name: str) -> Change | None:
    """The run with another preset; None where that is of another kind of model."""
    shape = dict(config.presets[name])
    bert = getattr(config, "bert", None)
    if bert is not None and shape.get("bert_style", "classic") != bert.bert_style:
        return None
    values = {**config.defaults(shape), **shape}
    if config.data.tokenizer is not None:
        values["vocab_size"] = config.model.vocab_size
    model = ModelConfig(preset=name, **{k: v for k, v in values.items() if k in field_infos(ModelConfig)})
    data = dataclasses.replace(config.data, seq_length=values.get("seq_length", config.data.seq_length))
    resolved = model.resolve(seq_length=data.seq_length, vocab_size=config.model.vocab_size)
    return Change(dataclasses.replace(config, model=resolved, data=data), (f"--preset {name}",))


def _is_as_named(config: ResolvedConfig, name: str) -> bool:
    """Whether no flag changes the preset's shape."""
    change = _as_preset(config, name)
    return change is not None and (change.config.model, change.config.data) == (config.model, config.data)
