"""What to change of a run that does not fit into memory: other flags, more ranks, a smaller model, a larger machine.

Every way out passes the same checks as the run itself, with what the formulas of memory.py expect, not only with what
is certain.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megacore.config import ExpertsConfig, ModelConfig, ResolvedConfig, violations
from megacore.config.dimensions import ranks_of_role
from megacore.config.fields import field_infos
from megacore.config.messages import counted
from megacore.plan.cluster import Cluster
from megacore.plan.fastest_schedule import fastest_that_fits, is_auto
from megacore.plan.memory import GIB, fullest_rank, held_on_host, plan_memory
from megacore.plan.outline import outline
from megacore.plan.room import Room
from megacore.plan.state import whole_parameters

_MOST_RANKS = 4096
_WAYS = 3
_MOST_CUT = 4  # times, of sequences that come before larger changes
_MOST_SMALLER = 0.8  # of the parameters, in a smaller preset
_SMALLER_MODEL = ", a smaller model"
_MOST_TP = 8  # neighbours with fast links, in most machines
# What saves memory, the cheapest first: nothing more is sent, then a little is computed again, then much moves.
_BY_PRICE = (
    "--schedule 1f1b",
    "--no-offload",
    "--zero-stage 1",
    "--sequence-parallel",
    "--precision bf16",
    "--recompute selective",
    "--recompute light",
    "--zero-stage 2",
    "--micro-batch-size",
    "--recompute full",
    "--zero-stage 3",
    "--offload-optimizer",
    "--offload-params",
)


_Option = tuple[str, str, dict[str, Any]]
"""A section, the flag that changes it, and the values that it sets."""


@dataclass(frozen=True)
class Change:
    """Another configuration, and the flags that make it of the given one."""

    config: ResolvedConfig
    flags: tuple[str, ...] = ()

    def and_(self, section: str, flag: str, **values: Any) -> Change:
        """With other values in a section. The flag replaces an earlier one of the same name."""
        changed, name = dataclasses.replace(getattr(self.config, section), **values), flag.partition(" ")[0]
        others = (other for other in self.flags if other.partition(" ")[0] != name or other.count(" --"))
        return Change(dataclasses.replace(self.config, **{section: changed}), (*others, flag))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory that every check of a run compares with.

    Attributes:
        room: of the device on which a rank computes; on a CPU all ranks of the machine share it.
        host: host memory beside the devices of a machine, for what is offloaded; None: not known.
        host_ranks: ranks that share it, where there are as many.
        on_cpu: whether the ranks compute on a CPU.
        local_ranks: ranks of each machine, in whole machines; 1: any number of ranks will do.
        torch_is_loaded: whether `room` is what is left with torch loaded.
        cluster: by whose times --schedule auto chooses; None: not known, and figures are those of 1F1B.
    """

    room: Room
    host: Room | None = None
    host_ranks: int = 1
    on_cpu: bool
    local_ranks: int = 1
    torch_is_loaded: bool = False
    cluster: Cluster | None = None

    def demand(self, config: ResolvedConfig) -> Demand:
        """What the fullest rank of a configuration is expected to take."""
        ranks = plan_memory(config, outline(config), on_cpu=self.on_cpu, torch_is_loaded=self.torch_is_loaded)
        return Demand(
            computing=max(rank.expected for rank in ranks),
            on_host=max(rank.on_host for rank in ranks),
            on_node=held_on_host(config, ranks, self.host_ranks),
        )

    def allow(self, demand: Demand, *, ranks: int | None = None) -> bool:
        """Whether the device and the host have as much, of all ranks of a machine, or of `ranks` if that is all."""
        return demand.computing * self._sharing(ranks) <= self.room.available and self.host_allows(demand)

    def fits(self, config: ResolvedConfig) -> bool:
        """Whether all ranks of a configuration have what they are expected to take."""
        ranks = config.parallel.ranks
        if (self.host is not None and config.offloads) or self.torch_is_loaded:
            return self.allow(self.demand(config), ranks=ranks)
        most = self.room.available / self._sharing(ranks)
        return fullest_rank(config, outline(config), on_cpu=self.on_cpu, limit=most).expected <= most

    def _sharing(self, ranks: int | None) -> int:
        """The ranks that share the room, of all ranks of a machine, or of `ranks` if that is all."""
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


def ways_out(config: ResolvedConfig, limits: Limits) -> list[str]:
    """Three ways out, each as a line to read, those that change least first: flags that fit, and where too few do,
    larger machines.

    Args:
        config: a resolved configuration that does not fit.
        limits: what there is.
    """
    config = config.for_device(on_cpu=limits.on_cpu)
    start = Change(config)
    ways: dict[tuple[str, ...], str] = {}
    smaller: list[int] = []  # parameters of the smaller models among them

    def add(candidates: Iterator[Change], note: str = "") -> None:
        for change in map(_with_its_batch, candidates):
            if any(set(way) <= set(change.flags) for way in ways) or not _is_valid(change, limits):
                continue
            if limits.fits(change.config):
                demand = limits.demand(_with_auto_schedule(change, limits))
                ways[change.flags] = f"{' '.join(change.flags)}{_where(change, config, limits)}{note}: {demand}"
                if note == _SMALLER_MODEL:
                    smaller.append(_parameters(change.config))
                return

    add(_fewer_in_flight(start))
    lean = start if ways else _by_1f1b(start)  # where that is not enough, it comes before what changes more
    add(_even_state(start))
    add(_savings(start, limits))
    add(_other_divisions(lean))
    if not ways:
        add(_longest(lean, limits, most_cut=_MOST_CUT), ", the longest sequences that fit")
    if len(ways) < _WAYS:
        add(_fewer_replicas(lean, limits))
    further: list[tuple[Callable[[], Iterator[Change]], str]] = [
        (lambda: _more_replicas(lean, limits), ""),
        (lambda: _more_stages(lean, limits), ""),
        (lambda: _smaller_models(lean), _SMALLER_MODEL),
        (lambda: _more_of_all(lean, limits), ""),
        (lambda: iter(()) if ways else _longest(lean, limits), ", the longest sequences that fit"),
        (lambda: _shorter(lean), ", shorter sequences"),
        (lambda: _fewer_layers(lean, above=_much_above(smaller)), _SMALLER_MODEL),
        (lambda: _smallest(lean, above=_much_above(smaller)), _SMALLER_MODEL),
    ]
    for family, note in further:
        if len(ways) < _WAYS:
            add(family(), note)
    lines = list(ways.values())[:_WAYS]
    larger = itertools.chain(_larger_hosts(start, limits), _larger_machines(start, limits))
    return [*lines, *itertools.islice(larger, max(_WAYS - len(lines), 0))]


def _much_above(smaller: list[int]) -> float:
    """Parameters above which a model is another way out than the smaller ones that there are."""
    return 2.0 * max(smaller, default=0)


def _is_valid(change: Change, limits: Limits) -> bool:
    return not violations(change.config, change.config.parallel.ranks, on_cpu=limits.on_cpu)


def _with_auto_schedule(change: Change, limits: Limits) -> ResolvedConfig:
    """The configuration with the schedule that --schedule auto, if it is given, chooses for these flags."""
    config, names_one = change.config, any(flag.startswith("--schedule ") for flag in change.flags)
    if limits.cluster is None or names_one or not (config.parallel.pp > 1 and is_auto(config)):
        return config
    return fastest_that_fits(config, outline(config), limits.cluster, limits.fits)


def _number_of(change: Change, config: ResolvedConfig, limits: Limits) -> int | None:
    """Of machines or devices, where it is not as many as before."""
    world = change.config.parallel.ranks
    if world == config.parallel.ranks:
        return None
    return world // limits.local_ranks if limits.on_cpu else world


def _where(change: Change, config: ResolvedConfig, limits: Limits) -> str:
    number = _number_of(change, config, limits)
    if number is None:
        return ""
    if limits.on_cpu and change.config.parallel.ranks < limits.local_ranks:
        return f", with {counted(change.config.parallel.ranks, 'rank')} on the machine"
    if not limits.on_cpu:
        return f", on {number} devices"
    fewer = limits.cluster is not None and limits.local_ranks < limits.cluster.device.node_ranks
    shared = f" (gpus_per_node = {limits.local_ranks})" if fewer else ""  # with more ranks each would have less
    return f", on {counted(number, 'machine')} with as much memory{shared}"


def _fewer_in_flight(start: Change) -> Iterator[Change]:
    """The same ranks by 1F1B, alone and with stages of as much state each."""
    change = _by_1f1b(start)
    if change is not start:
        yield change
        yield from _even_state(change)


def _by_1f1b(start: Change) -> Change:
    """The same by 1F1B; as it is where that is no change or not possible."""
    for section, flag, values in _schedules(start.config):
        return start.and_(section, flag, **values)
    return start


def _schedules(config: ResolvedConfig) -> list[_Option]:
    """1F1B, which keeps the fewest microbatches, where the schedule is another."""
    parallel = config.parallel
    if parallel.schedule_name == "1f1b" or parallel.schedule_csv is not None:
        return []
    if parallel.virtual_stages == 1:
        return [("parallel", "--schedule 1f1b", {"schedule": "1f1b"})]
    if parallel.pipeline_layout is not None:
        return []
    return [("parallel", "--schedule 1f1b --virtual-stages 1", {"schedule": "1f1b", "virtual_stages": 1})]


def _other_divisions(start: Change) -> Iterator[Change]:
    """The same ranks with more of them for each replica of the model, as few as may be: neighbours split matrices
    first, and within a machine."""
    parallel = start.config.parallel
    if parallel.schedule_csv is not None or parallel.pipeline_layout is not None:
        return
    ranks = parallel.tp * parallel.pp * parallel.dp
    for change in _thrifty(start):
        for dp in reversed(_divisors(ranks)):
            of_replica = ranks // dp
            for tp in reversed(_divisors(of_replica)):
                if dp < parallel.dp and tp <= max(_MOST_TP, parallel.tp):
                    pp = of_replica // tp
                    yield change.and_("parallel", f"--tp {tp} --pp {pp} --dp {dp}", tp=tp, pp=pp, dp=dp)


def _fewer_replicas(start: Change, limits: Limits) -> Iterator[Change]:
    """On a CPU, whose memory all ranks share: fewer of them, as many as may be."""
    parallel = start.config.parallel
    if not limits.on_cpu or parallel.ranks != limits.local_ranks:
        return
    for change in _thrifty(start):
        for dp in reversed(_divisors(parallel.dp)[:-1]):
            yield _with_batch(change, dp).and_("parallel", f"--dp {dp}", dp=dp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _even_state(start: Change) -> Iterator[Change]:
    """The same ranks with as much state on every stage, where stages are balanced by time."""
    parallel = start.config.parallel
    if parallel.pp > 1 and parallel.pipeline_balance == "time" and parallel.pipeline_layout is None:
        yield start.and_("parallel", "--pipeline-balance parameters", pipeline_balance="parameters")


def _savings(start: Change, limits: Limits) -> Iterator[Change]:
    """The same ranks and model with flags that save memory, the fewest and gentlest first."""
    training, parallel, dp = start.config.training, start.config.parallel, start.config.parallel.dp
    on_cpu = limits.on_cpu
    kinds = ("none", "selective", "light", "full")
    batch = training.global_batch_size // dp
    smaller = [m for m in (training.micro_batch_size // n for n in (2, 4, 8)) if m] + [1]
    groups: list[list[_Option]] = [
        _schedules(start.config),
        [
            ("parallel", f"--zero-stage {stage}", {"zero_stage": stage})
            for stage in range(parallel.zero_stage + 1, 4 if dp > 1 else 0)
        ],
        [
            ("training", f"--recompute {kind}", {"recompute": kind})
            for kind in kinds[kinds.index(training.recompute) + 1 :]
        ],
        [
            ("training", f"--micro-batch-size {size}", {"micro_batch_size": size})
            for size in dict.fromkeys(smaller)
            if size < training.micro_batch_size and batch % size == 0
        ],
    ]
    if parallel.tp > 1 and not parallel.sequence_parallel:
        groups.append([("parallel", "--sequence-parallel", {"sequence_parallel": True})])
    offloads: list[_Option] = []
    if not on_cpu and not parallel.offload_optimizer:
        offloads.append(("parallel", "--offload-optimizer", {"offload_optimizer": True}))
    if not on_cpu and not parallel.offload_params:
        flags = ["--offload-params", *([] if parallel.offload_optimizer else ["--offload-optimizer"])]
        flags += [] if parallel.zero_stage == 3 else ["--zero-stage 3"]
        needed = {"offload_params": True, "offload_optimizer": True, "zero_stage": 3}
        offloads.append(("parallel", " ".join(flags), needed))
    if offloads:
        groups.append(offloads)
    groups += [[option] for option in _kept_off_host(start, limits)]
    if start.config.precision.precision == "fp32":
        groups.append([("precision", "--precision bf16", {"precision": "bf16"})])
    choices = [[option for option in chosen if option] for chosen in itertools.product(*([None, *g] for g in groups))]
    for choice in sorted(choices, key=lambda chosen: (len(chosen), sum(_price(flag) for _, flag, _ in chosen))):
        change = start
        for section, flag, values in choice:
            change = change.and_(section, flag, **values)
        if change is not start:
            yield change


def _kept_off_host(start: Change, limits: Limits) -> list[_Option]:
    """Less in host memory, where that is too small; on a CPU, where offloading takes copies of the gradients and saves
    nothing, no offloading of the optimizer."""
    parallel, training = start.config.parallel, start.config.training
    options: list[_Option] = []
    if parallel.offload_optimizer:
        options.append(("parallel", "--no-offload-optimizer", {"offload_optimizer": False}))
    if limits.on_cpu or limits.host_allows(limits.demand(start.config)):
        return options if limits.on_cpu else []
    if parallel.offload_params:
        options.append(("parallel", "--no-offload-params", {"offload_params": False}))
    if training.offload_activations:
        options.append(("training", "--no-offload-activations", {"offload_activations": False}))
    return options


def _price(flag: str) -> int:
    """The place of a flag that saves memory in the order of what it costs in time."""
    return next((place for place, known in enumerate(_BY_PRICE) if flag.startswith(known)), len(_BY_PRICE))


def _thrifty(change: Change) -> Iterator[Change]:
    """The same, then with every activation that can be computed again, then with the smallest microbatch as well."""
    yield change
    if change.config.training.recompute != "full":
        change = change.and_("training", "--recompute full", recompute="full", recompute_num_layers=None)
        yield change
    if change.config.training.micro_batch_size > 1:
        yield change.and_("training", "--micro-batch-size 1", micro_batch_size=1)


def _more_replicas(start: Change, limits: Limits) -> Iterator[Change]:
    """ZeRO stage 3 over more and more data-parallel ranks."""
    parallel, dp = start.config.parallel, start.config.parallel.dp
    while (ranks := parallel.ranks // parallel.dp * (dp := dp * 2)) <= _MOST_RANKS:
        if ranks % limits.local_ranks == 0:
            for thrifty in _thrifty(start):
                change = _with_batch(thrifty, dp)
                yield change.and_("parallel", f"--dp {dp} --zero-stage 3", dp=dp, zero_stage=3)


def _more_stages(start: Change, limits: Limits) -> Iterator[Change]:
    """The layers split over more and more ranks, by tp up to eight neighbours, and beyond by pp."""
    parallel = start.config.parallel
    if parallel.schedule_csv is not None or parallel.pipeline_layout is not None:
        return
    for ranks in (2**n for n in range(1, 9)):
        for thrifty in _thrifty(start):
            for tp in (t for t in (8, 4, 2, 1) if ranks % t == 0):
                pp = ranks // tp
                grown = tp >= parallel.tp and pp >= parallel.pp and tp * pp > parallel.tp * parallel.pp
                others = parallel.ranks // (parallel.tp * parallel.pp)
                if grown and tp * pp * others % limits.local_ranks == 0:
                    degrees = [f"--{name} {degree}" for name, degree in (("tp", tp), ("pp", pp)) if degree > 1]
                    yield thrifty.and_("parallel", " ".join(degrees), tp=tp, pp=pp)


def _more_of_all(start: Change, limits: Limits) -> Iterator[Change]:
    """More ranks in every dimension together, with every flag that saves memory."""
    parallel = start.config.parallel
    if parallel.schedule_csv is not None or parallel.pipeline_layout is not None:
        return
    for factor in (2**n for n in range(1, 13)):
        ranks = parallel.ranks * factor
        if ranks > _MOST_RANKS or ranks % limits.local_ranks:
            continue
        for more_tp, more_pp in itertools.product((8, 4, 2, 1), (1, 2, 4, 8, 16, 32)):
            tp, pp, rest = parallel.tp * more_tp, parallel.pp * more_pp, factor // (more_tp * more_pp)
            if tp > _MOST_TP * max(parallel.tp // _MOST_TP, 1) or rest * more_tp * more_pp != factor:
                continue
            dp = parallel.dp * rest
            degrees = [
                f"--{name} {degree}" for name, degree in (("tp", tp), ("pp", pp)) if degree > getattr(parallel, name)
            ]
            change = start.and_("parallel", " ".join(degrees), tp=tp, pp=pp) if degrees else start
            if rest > 1:
                change = _with_batch(change, dp).and_("parallel", f"--dp {dp}", dp=dp)
            yield _thriftiest(change)


def _thriftiest(change: Change) -> Change:
    """Every flag that saves device memory and changes neither the model nor the ranks."""
    *_, change = _thrifty(_by_1f1b(change))
    parallel = change.config.parallel
    if change.config.precision.precision == "fp32":
        change = change.and_("precision", "--precision bf16", precision="bf16")
    if parallel.tp > 1 and not parallel.sequence_parallel:
        change = change.and_("parallel", "--sequence-parallel", sequence_parallel=True)
    if parallel.dp > 1 and parallel.zero_stage < 3:
        change = change.and_("parallel", "--zero-stage 3", zero_stage=3)
    return change


def _with_batch(change: Change, dp: int) -> Change:
    """A global batch that `dp` replicas can share: the given one, or one microbatch for each."""
    training = change.config.training
    batch = training.micro_batch_size * dp
    if training.global_batch_size % batch == 0:
        return change
    return change.and_("training", f"--global-batch-size {batch}", global_batch_size=batch)


def _with_its_batch(change: Change) -> Change:
    """With the flag that keeps the global batch, whose default is one microbatch for each replica: of other ones."""
    training, named = change.config.training, any(flag.startswith("--global-batch-size ") for flag in change.flags)
    sizes = ("--micro-batch-size ", "--dp ")
    if named or change.config.microbatches == 1 or not any(flag.startswith(sizes) for flag in change.flags):
        return change
    return Change(change.config, (*change.flags, f"--global-batch-size {training.global_batch_size}"))


def _may_change_model(config: ResolvedConfig) -> bool:
    """Whether the weights are not those of a checkpoint, which decide the model's shape."""
    return config.checkpoint.load is None and config.checkpoint.init_from_hf is None


def _smaller_models(start: Change) -> Iterator[Change]:
    """The larger presets before the smaller ones; without a preset, or where flags change its shape, fewer layers."""
    name = start.config.model.preset
    if name is None or not _is_as_named(start.config, name):  # the flags would change another preset's shape as well
        yield from _fewer_layers(start)
        return
    for change in _smaller_presets(start, most_cut=_MOST_CUT):
        yield from _thrifty(change)


def _smaller_presets(start: Change, *, most_cut: float = math.inf) -> list[Change]:
    """Presets with noticeably fewer parameters for sequences of the same length, the largest first; then those whose
    sequences are up to `most_cut` times shorter."""
    config, name, length = start.config, start.config.model.preset, start.config.data.seq_length
    if not _may_change_model(config):
        return []
    candidates = [_as_preset(config, other, seq_length=length) for other in config.presets if other != name]
    changes = [Change(c.config, (*start.flags, *c.flags)) for c in candidates if c is not None]
    changes = [change for change in changes if length <= most_cut * change.config.data.seq_length]
    most = _MOST_SMALLER * _parameters(config)
    sized = [(c.config.data.seq_length == length, size, c) for c in changes if (size := _parameters(c.config)) <= most]
    return [change for *_, change in sorted(sized, key=lambda item: item[:2], reverse=True)]


def _parameters(config: ResolvedConfig) -> int:
    return whole_parameters(config, outline(config))


def _fewer_layers(start: Change, *, above: float = 0.0) -> Iterator[Change]:
    """As many of the layers as fit, in models of more than some number of parameters."""
    layers = start.config.model.num_layers
    fractions = {layers * n // 8 for n in range(1, 8)} | {layers >> n for n in range(4, 16)}
    if _may_change_model(start.config):
        for fewer in sorted(fractions - {0}, reverse=True):
            change = start.and_("model", f"--num-layers {fewer}", num_layers=fewer)
            if not above or _parameters(change.config) > above:
                yield from _thrifty(change)


def _longest(start: Change, limits: Limits, *, most_cut: float = math.inf) -> Iterator[Change]:
    """The longest sequences that fit with the same other flags, to a multiple of 16 that the ranks can split; none
    where they are more than `most_cut` times shorter."""
    parallel = start.config.parallel
    unit = math.lcm(16 * ranks_of_role("layer", parallel), parallel.sequence_unit(sequence_parallel=True))
    fits = functools.partial(_fits_with_length, start, limits)
    length = start.config.data.seq_length
    units = bisect.bisect_left(range(1, length // unit), True, key=lambda n: not fits(n * unit))
    if units and length <= most_cut * units * unit:
        yield _with_length(start, units * unit)


def _fits_with_length(start: Change, limits: Limits, length: int) -> bool:
    return limits.allow(limits.demand(_with_length(start, length).config))


def _with_length(start: Change, length: int) -> Change:
    """Shorter sequences. A model without a preset that has a position per token then has as many positions fewer."""
    change, model = start.and_("data", f"--seq-length {length}", seq_length=length), start.config.model
    is_derived = model.preset is None and model.max_position_embeddings == start.config.data.seq_length
    if not is_derived or not _may_change_model(start.config):
        return change
    return change.and_("model", f"--max-position-embeddings {length}", max_position_embeddings=length)


def _shorter(start: Change) -> Iterator[Change]:
    """Half the sequence, a quarter, and so on."""
    length, parallel = start.config.data.seq_length, start.config.parallel
    unit = parallel.sequence_unit(sequence_parallel=bool(parallel.sequence_parallel)) if parallel.cp > 1 else 1
    while (length := length // 2) >= 16 and length % unit == 0:
        change = _with_length(start, length)
        yield from _thrifty(change)
        yield _thriftiest(change)


def _much_smaller(start: Change) -> list[Change]:
    """Presets, or fewer layers, the largest model first."""
    name = start.config.model.preset
    as_named = name is not None and _is_as_named(start.config, name)
    return _smaller_presets(start) if as_named else list(_fewer_layers(start))


def _smallest(start: Change, *, above: float = 0.0) -> Iterator[Change]:
    """Smaller models, of more than some number of parameters, with every other saving as well."""
    for change in _much_smaller(start):
        if above and _parameters(change.config) <= above:
            continue
        thrifty = _thriftiest(change)
        yield thrifty
        yield from _shorter(thrifty)


def _larger_hosts(start: Change, limits: Limits) -> Iterator[str]:
    """The host memory that the run needs, where it is all that is too small."""
    demand = limits.demand(start.config)
    if not limits.host_allows(demand) and demand.computing <= limits.room.available:
        yield f"the same flags, on machines with at least {_up_to_tenths(demand.on_node)} GiB of host memory"


def _larger_machines(start: Change, limits: Limits) -> Iterator[str]:
    """What the run needs on larger machines: with every saving flag, unchanged, with the smallest change of model,
    with some saving flags, and on more of them. Left out is what fits on the given machines, and what needs as much as
    the unchanged run."""
    machines = "machines" if limits.on_cpu else "devices"
    models = map(_thriftiest, reversed(_much_smaller(start)))
    smallest = next((change for change in models if _is_valid(change, limits)), None)
    further = itertools.chain(
        _savings(start, limits),
        _more_replicas(start, limits),
        _more_stages(start, limits),
    )
    candidates = itertools.chain([_thriftiest(start), start], [] if smallest is None else [smallest], further)
    seen: set[tuple[str, ...]] = set()
    most = _tenths(limits.demand(start.config))
    for change in map(_with_its_batch, candidates):
        if change.flags in seen or not _is_valid(change, limits):
            continue
        seen.add(change.flags)
        if limits.fits(change.config):  # the machines that there are suffice
            continue
        demand = limits.demand(change.config)
        if limits.host_allows(demand) and (_tenths(demand) < most or not change.flags):
            flags, number = " ".join(change.flags) or "the same flags", _number_of(change, start.config, limits)
            where = f"{number} {machines}" if number else machines
            yield f"{flags}, on {where} with at least {_up_to_tenths(demand.computing)} GiB per rank"


def _tenths(demand: Demand) -> int:
    """Tenths of a GiB where a rank computes, rounded up."""
    return math.ceil(demand.computing / GIB * 10)


def _up_to_tenths(size: float) -> str:
    """Bytes in GiB, rounded up to tenths."""
    return f"{math.ceil(size / GIB * 10) / 10:,.1f}"


def _as_preset(config: ResolvedConfig, name: str, *, seq_length: int | None = None) -> Change | None:
    """The run with another preset; None where that is of another kind of model.

    Args:
        config: of the run.
        name: of the preset.
        seq_length: of the run, which a preset with fewer positions cuts to as many. None: that of the preset.
    """
    shape = dict(config.presets[name])
    bert = getattr(config, "bert", None)
    if bert is not None and shape.get("bert_style", "classic") != bert.bert_style:
        return None
    if "num_experts" in shape:  # whose ranks may have to be divided otherwise
        return None
    values = {**config.defaults(shape), **shape}
    if config.data.tokenizer is not None:
        values["vocab_size"] = config.model.vocab_size
    model = ModelConfig(preset=name, **{k: v for k, v in values.items() if k in field_infos(ModelConfig)})
    usual = values.get("seq_length", config.data.seq_length)
    length = usual if seq_length is None else min(seq_length, values.get("max_position_embeddings", seq_length))
    data = dataclasses.replace(config.data, seq_length=length)
    resolved = model.resolve(seq_length=length, vocab_size=config.model.vocab_size)
    dense: dict[str, Any] = {} if bert is not None else {"experts": ExpertsConfig()}  # those of a preset go with it
    flags = f"--preset {name}", *([] if length == usual == config.data.seq_length else [f"--seq-length {length}"])
    return Change(dataclasses.replace(config, model=resolved, data=data, **dense), flags)


def _is_as_named(config: ResolvedConfig, name: str) -> bool:
    """Whether no flag changes the preset's shape."""
    change = _as_preset(config, name)
    return change is not None and (change.config.model, change.config.data) == (config.model, config.data)
