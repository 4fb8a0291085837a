"""What to change of a run that does not fit into memory: other flags, more ranks, a smaller model, a larger machine.

Every suggestion passes the same checks as the run itself, with what memory.py expects, not only with what is certain.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config import ExpertsConfig, ModelConfig, ParallelConfig, ResolvedConfig, violations
from megacore.config.dimensions import ranks_of_role
from megacore.config.fields import field_infos
from megacore.config.messages import counted, divisors
from megacore.config.schema import section_of
from megacore.config.spelling import flag_and_value
from megacore.models.outline import outline
from megacore.parallel.host_memory import AvailableMemory
from megacore.pipeline.schedule_choice import is_auto
from megacore.plan.cluster import Cluster
from megacore.plan.fastest_schedule import fastest_that_fits
from megacore.plan.memory import GIB, MOST_MEMORY, fullest_rank, held_on_host, plan_memory, uses_host
from megacore.plan.state import whole_parameters

_MOST_RANKS = 4096
_MORE = tuple(2**n for n in range(1, 13))  # times as many ranks
_MOST = 3  # suggestions
_MOST_CUT = 4  # times, of sequences that come before larger changes
_MOST_SMALLER = 0.8  # of the parameters, in a smaller preset
_SMALLER_MODEL, _LONGEST = ", a smaller model", ", the longest sequences that fit"
_MOST_TP = 8  # neighbours with fast links, in most machines
# Work for one refusal, of 30 to 50 microseconds: a check plans every layer, and does as much besides as for some more.
_MOST_WORK = 30_000
_WORK_BESIDE_LAYERS = 60
_KINDS_OF_RECOMPUTE = ("none", "selective", "light", "full")
# What saves memory, by what it costs in time: nothing more is sent, then a little is computed again, then much moves.
_PRICES: Mapping[tuple[str, Any], int] = {
    ("schedule", "1f1b"): 0,
    ("pipeline_balance", "parameters"): 0,
    ("offload_optimizer", False): 1,
    ("offload_params", False): 1,
    ("offload_activations", False): 1,
    ("zero_stage", 1): 2,
    ("sequence_parallel", True): 3,
    ("precision", "bf16"): 4,
    ("recompute", "selective"): 5,
    ("recompute", "light"): 6,
    ("zero_stage", 2): 7,
    ("micro_batch_size", None): 8,  # any size
    ("recompute", "full"): 9,
    ("zero_stage", 3): 10,
    ("offload_optimizer", True): 11,
    ("offload_params", True): 12,
}

_Option = Mapping[str, Any]
"""Values by field that are set together."""


@dataclass(frozen=True)
class Suggestion:
    """A change that makes a run fit, as a line to read.

    Attributes:
        flags: that replace those of the run; none, where it keeps its own.
        note: what follows them.
    """

    flags: str
    note: str

    def __str__(self) -> str:
        return f"{self.flags or 'the same flags'}{self.note}"

    def in_markdown(self) -> str:
        """The line with its flags as code, to be copied."""
        return f"`{self.flags}`{self.note}" if self.flags else str(self)


def suggestions(config: ResolvedConfig, limits: Limits) -> list[Suggestion]:
    """Three suggestions, those that change least first: flags that fit, and where too few do, larger machines.

    The deeper the model, the fewer candidates of each kind are checked. Work is counted and not timed, so that the same
    run has the same suggestions everywhere.

    Args:
        config: a resolved configuration that does not fit.
        limits: what there is.
    """
    config = config.for_device(on_cpu=limits.on_cpu)
    start = ChangedRun(config)
    fitting: list[ChangedRun] = []
    suggested: list[Suggestion] = []
    has_smaller = False  # whether a smaller model is among them
    checks = _MOST_WORK // (config.model.num_layers + _WORK_BESIDE_LAYERS)

    def add(candidates: Iterator[ChangedRun], note: str = "") -> None:
        nonlocal checks, has_smaller
        for change in _spread(candidates, max(checks // 2, 1)):
            checks -= 1
            if any(_contains(change, other) for other in fitting) or not _is_valid(change, limits):
                continue
            if limits.fits(change.config):
                demand = limits.demand(_with_auto_schedule(change, limits))
                fitting.append(change)
                most = MOST_MEMORY * demand.computing  # host memory has no range
                is_tight = most * limits.sharing(change.config.parallel.ranks) > limits.memory.available
                tight = f" (tight: up to {size_text(most)})" if is_tight else ""
                flags = change.with_its_batch().flags
                suggested.append(Suggestion(flags, f"{_where(change, config, limits)}{note}: {demand}{tight}"))
                has_smaller |= note == _SMALLER_MODEL
                return

    add(_savings(start, limits))
    # Where that is not enough, 1F1B comes before what changes more.
    lean = start if suggested else start.and_(**_one_f_one_b(start.config))
    add(_divisions(lean, limits, (1,), dp=False, model=True))
    if not suggested:
        add(_longest(lean, limits, most_cut=_MOST_CUT), _LONGEST)
    if len(suggested) < _MOST:
        add(_fewer_replicas(lean, limits))
    further: list[tuple[Callable[[], Iterator[ChangedRun]], str]] = [
        (lambda: _savings(start, limits, most=2), ""),
        (lambda: _divisions(lean, limits, dp=True, model=False), ""),
        (lambda: _divisions(lean, limits, dp=False, model=True), ""),
        (lambda: itertools.chain(*map(_thrifty, _smaller(lean, most_cut=_MOST_CUT))), _SMALLER_MODEL),
        (lambda: _divisions(lean, limits, dp=True, model=True), ""),
        (lambda: _longest(lean, limits), _LONGEST),
        (lambda: _longest(_thriftiest(lean), limits), _LONGEST),
        (lambda: iter(()) if has_smaller else map(_thriftiest, _smaller(lean)), _SMALLER_MODEL),
    ]
    for family, note in further:
        if len(suggested) < _MOST:
            add(family(), note)
    larger = _larger_machines(start, limits, max(checks // 4, 1))
    return [*suggested[:_MOST], *itertools.islice(larger, max(_MOST - len(suggested), 0))]


def _spread(candidates: Iterator[ChangedRun], most: int) -> Iterator[ChangedRun]:
    """The candidates; where they are more than `most`, so many at equal distances, with the last one."""
    first = list(itertools.islice(candidates, most))
    rest = list(candidates) if len(first) == most else []
    every = [*first, *rest]
    return (every[(n + 1) * len(every) // most - 1] for n in range(most)) if rest else iter(first)


def _contains(change: ChangedRun, other: ChangedRun) -> bool:
    """Whether a change has all that another one has, or the same with a still smaller microbatch."""
    values, micro = {**change.values}, other.values.get("micro_batch_size", 0)
    if 0 < values.get("micro_batch_size", 0) < micro:
        values["micro_batch_size"] = micro
    return other.values.items() <= values.items()


def _is_valid(change: ChangedRun, limits: Limits) -> bool:
    return not violations(change.config, change.config.parallel.ranks, on_cpu=limits.on_cpu)


def _with_auto_schedule(change: ChangedRun, limits: Limits) -> ResolvedConfig:
    """The configuration with the schedule that --schedule auto, if it is given, chooses for these flags."""
    config = change.config
    if limits.cluster is None or "schedule" in change.values or not (config.parallel.pp > 1 and is_auto(config)):
        return config
    return fastest_that_fits(config, outline(config), limits.cluster, limits.fits)


def _number_of(change: ChangedRun, config: ResolvedConfig, limits: Limits) -> int | None:
    """Of machines or devices, where it is not as many as before."""
    world = change.config.parallel.ranks
    if world == config.parallel.ranks:
        return None
    return world // limits.local_ranks if limits.on_cpu else world


def _where(change: ChangedRun, config: ResolvedConfig, limits: Limits) -> str:
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


def _one_f_one_b(config: ResolvedConfig) -> _Option:
    """1F1B, which keeps the fewest microbatches, where the schedule is another and may be changed."""
    parallel = config.parallel
    is_laid_out = parallel.virtual_stages > 1 and parallel.pipeline_layout is not None
    if parallel.schedule_name == "1f1b" or parallel.schedule_csv is not None or is_laid_out:
        return {}
    return {"schedule": "1f1b", "virtual_stages": 1}


def _divisions(
    start: ChangedRun, limits: Limits, factors: Iterable[int] = _MORE, *, dp: bool, model: bool
) -> Iterator[ChangedRun]:
    """So many times as many ranks, the fewest first: for each replica of the `model`, of which neighbours split
    matrices first; or for more replicas (`dp`), on ZeRO's stage 3; or for both, with every flag that saves memory."""
    parallel = start.config.parallel
    if model and (parallel.schedule_csv is not None or parallel.pipeline_layout is not None):
        return
    for factor in factors:
        ranks = parallel.tp * parallel.pp * parallel.dp * factor
        if parallel.ranks * factor > _MOST_RANKS or parallel.ranks * factor % limits.local_ranks:
            continue
        for change in [start] if dp and model else _thrifty(start):
            for replicas in reversed(divisors(ranks, most=None)):
                of_model, of_dp = ranks // replicas > parallel.tp * parallel.pp, replicas > parallel.dp
                if not (of_model or of_dp) or of_model > model or of_dp > dp or (replicas < parallel.dp and factor > 1):
                    continue
                for tp in reversed(divisors(ranks // replicas, most=None)):
                    pp = ranks // replicas // tp
                    if parallel.tp <= tp <= max(_MOST_TP, parallel.tp) and pp >= parallel.pp:
                        divided = _with_replicas(change.and_(tp=tp, pp=pp), replicas)
                        divided = divided.and_(zero_stage=3) if of_dp else divided
                        yield _thriftiest(divided) if dp and model else divided


def _fewer_replicas(start: ChangedRun, limits: Limits) -> Iterator[ChangedRun]:
    """On a CPU, whose memory all ranks share: fewer of them, as many as may be."""
    parallel = start.config.parallel
    if not limits.on_cpu or parallel.ranks != limits.local_ranks:
        return
    for change in _thrifty(start):
        for dp in reversed(divisors(parallel.dp, most=None)[:-1]):
            yield _with_replicas(change, dp)


def _savings(start: ChangedRun, limits: Limits, *, most: int | None = None) -> Iterator[ChangedRun]:
    """The same ranks and model with settings that save memory, the fewest (at most `most`) and gentlest first."""
    training, parallel, dp = start.config.training, start.config.parallel, start.config.parallel.dp
    kinds = _KINDS_OF_RECOMPUTE[_KINDS_OF_RECOMPUTE.index(training.recompute) + 1 :]
    smaller = [n for n in divisors(training.global_batch_size // dp, most=None) if n < training.micro_batch_size]
    groups: list[list[_Option]] = [
        [option] if (option := _one_f_one_b(start.config)) else [],
        [{"pipeline_balance": "parameters"}] if parallel.pp > 1 and parallel.pipeline_layout is None else [],
        [{"zero_stage": stage} for stage in range(parallel.zero_stage + 1, 4 if dp > 1 else 0)],
        [{"recompute": kind} for kind in kinds],
        [{"micro_batch_size": n} for n in reversed(smaller)],
        [{"sequence_parallel": True}] if parallel.tp > 1 and not parallel.sequence_parallel else [],
        [] if limits.on_cpu else [*_offloads(parallel)],
        *([option] for option in _kept_off_host(start, limits)),
        [{"precision": "bf16"}] if start.config.precision.precision == "fp32" else [],
    ]
    choices = [[option for option in chosen if option] for chosen in itertools.product(*([None, *g] for g in groups))]
    for choice in sorted(choices, key=lambda chosen: (len(chosen), sum(map(_price, chosen)))):
        if choice and (most is None or len(choice) <= most):
            yield start.and_(**functools.reduce(operator.or_, choice))


def _offloads(parallel: ParallelConfig) -> Iterator[_Option]:
    """More in host memory: the optimizer, or the parameters as well."""
    if not parallel.offload_optimizer:
        yield {"offload_optimizer": True}
    if not parallel.offload_params:
        yield {"offload_params": True, "offload_optimizer": True, "zero_stage": 3}


def _kept_off_host(start: ChangedRun, limits: Limits) -> list[_Option]:
    """Less in host memory, where that is too small; on a CPU, where offloading takes copies of the gradients and saves
    nothing, no offloading of the optimizer."""
    parallel, training = start.config.parallel, start.config.training
    optimizer: list[_Option] = [{"offload_optimizer": False}] if parallel.offload_optimizer else []
    if limits.on_cpu or limits.host_allows(limits.demand(start.config)):
        return optimizer if limits.on_cpu else []
    params: list[_Option] = [{"offload_params": False}] if parallel.offload_params else []
    activations: list[_Option] = [{"offload_activations": False}] if training.offload_activations else []
    return [*optimizer, *params, *activations, *([{"survive": False}] if start.config.watch.survive else [])]


def _price(option: _Option) -> int:
    """The place of values that save memory in the order of what they cost in time."""
    return max(_PRICES.get(item, _PRICES.get((item[0], None), 0)) for item in option.items())


def _thrifty(change: ChangedRun) -> Iterator[ChangedRun]:
    """The same, then with every activation that can be computed again, then with the smallest microbatch as well."""
    yield change
    for saving in ({"recompute": "full"}, {"micro_batch_size": 1}):
        before, change = change, change.and_(**saving)
        if change is not before:
            yield change


def _thriftiest(change: ChangedRun) -> ChangedRun:
    """Every flag that saves device memory and changes neither the model nor the ranks."""
    *_, change = _thrifty(change.and_(**_one_f_one_b(change.config)))
    parallel = change.config.parallel
    if change.config.precision.precision == "fp32":
        change = change.and_(precision="bf16")
    if parallel.tp > 1:
        change = change.and_(sequence_parallel=True)
    return change.and_(zero_stage=3) if parallel.dp > 1 else change


def _with_replicas(change: ChangedRun, dp: int) -> ChangedRun:
    """`dp` replicas, with a global batch that they can share: the given one, or one microbatch for each."""
    training = change.config.training
    batch = training.micro_batch_size * dp
    shared = change if training.global_batch_size % batch == 0 else change.and_(global_batch_size=batch)
    return shared.and_(dp=dp)


def _may_change_model(config: ResolvedConfig) -> bool:
    """Whether the weights are not those of a checkpoint, which decide the model's shape."""
    return config.checkpoint.load is None and config.checkpoint.init_from_hf is None


def _smaller(start: ChangedRun, *, most_cut: float = math.inf) -> list[ChangedRun]:
    """Smaller models, the largest first: presets with noticeably fewer parameters for sequences of the same length,
    then those whose sequences are up to `most_cut` times shorter. Without a preset, or where flags change its shape,
    fewer layers: such flags would change another preset's shape as well."""
    config, name, length = start.config, start.config.model.preset, start.config.data.seq_length
    if not _may_change_model(config):
        return []
    same = None if name is None else start.and_preset(name)
    if same is None or (same.config.model, same.config.data) != (config.model, config.data):
        layers = config.model.num_layers
        fractions = {layers * n // 8 for n in range(1, 8)} | {layers >> n for n in range(4, 16)}
        return [start.and_(num_layers=fewer) for fewer in sorted(fractions - {0}, reverse=True)]
    candidates = [start.and_preset(other, seq_length=length) for other in config.presets if other != name]
    changes = [c for c in candidates if c is not None and length <= most_cut * c.config.data.seq_length]
    sizes = [whole_parameters(change.config, outline(change.config)) for change in (start, *changes)]
    most = _MOST_SMALLER * sizes[0]
    sized = [(c.config.data.seq_length == length, size, c) for c, size in zip(changes, sizes[1:], strict=True)]
    ordered = sorted(sized, key=lambda item: item[:2], reverse=True)
    return [change for _, size, change in ordered if size <= most]


def _longest(start: ChangedRun, limits: Limits, *, most_cut: float = math.inf) -> Iterator[ChangedRun]:
    """The longest sequences that fit with the same other flags, to a multiple of 16 that the ranks can split; none
    where they are more than `most_cut` times shorter."""
    parallel = start.config.parallel
    unit = math.lcm(16 * ranks_of_role("layer", parallel), parallel.sequence_unit(sequence_parallel=True))
    length = start.config.data.seq_length

    def is_too_long(units: int) -> bool:
        return not limits.fits(_with_length(start, units * unit).config)

    shortest = max(math.ceil(length / (most_cut * unit)), 1)
    if shortest < length // unit and not is_too_long(shortest):
        units = bisect.bisect_left(range(1, length // unit), True, lo=shortest, key=is_too_long)
        yield _with_length(start, units * unit)


def _with_length(start: ChangedRun, length: int) -> ChangedRun:
    """Shorter sequences. A model without a preset that has a position per token then has as many positions fewer."""
    change, model = start.and_(seq_length=length), start.config.model
    is_derived = model.preset is None and model.max_position_embeddings == start.config.data.seq_length
    if not is_derived or not _may_change_model(start.config):
        return change
    return change.and_(max_position_embeddings=length)


def _larger_machines(start: ChangedRun, limits: Limits, most: int) -> Iterator[Suggestion]:
    """What the run needs on larger machines: of host memory, where that is all that is too small; with every saving
    flag, unchanged, with the smallest change of model, and with some saving flags or on more of them, at most so many.
    Left out is what fits on the given machines, and what needs as much as the unchanged run."""
    machines = "machines" if limits.on_cpu else "devices"
    models = map(_thriftiest, reversed(_smaller(start)))
    smallest = next((change for change in models if _is_valid(change, limits)), None)
    further = itertools.chain(
        _savings(start, limits),
        _divisions(start, limits, dp=True, model=False),
        _divisions(start, limits, dp=False, model=True),
    )
    first = [_thriftiest(start), start, *([] if smallest is None else [smallest])]
    candidates = itertools.chain(first, itertools.islice(further, most))
    seen = list[Mapping[str, Any]]()
    demand = limits.demand(start.config)
    unchanged = _tenths(demand.computing)
    if not limits.host_allows(demand) and demand.computing <= limits.memory.available:
        yield Suggestion("", f", on machines with at least {_tenths(demand.on_node) / 10:,.1f} GiB of host memory")
    for change in map(ChangedRun.with_its_batch, candidates):
        if change.values in seen or not _is_valid(change, limits):
            continue
        seen.append(change.values)
        if limits.fits(change.config):  # the machines that there are suffice
            continue
        demand, number = limits.demand(change.config), _number_of(change, start.config, limits)
        tenths, where = _tenths(demand.computing), f"{number} {machines}" if number else machines
        if limits.host_allows(demand) and (tenths < unchanged or not change.values):
            yield Suggestion(change.flags, f", on {where} with at least {tenths / 10:,.1f} GiB per rank")


def _tenths(size: float) -> int:
    """Bytes in tenths of a GiB, rounded up."""
    return math.ceil(size / GIB * 10)


# ---- a change of a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangedRun:
    """Another configuration, and what makes it of the given one.

    Attributes:
        config: with the change.
        values: by field, which the flags of the run do not have or must keep.
    """

    config: ResolvedConfig
    values: Mapping[str, Any] = field(default_factory=dict)

    def and_(self, **values: Any) -> ChangedRun:
        """With other values of fields as well; the same change, where the configuration has all of them."""
        sections = {name: getattr(self.config, section_of(type(self.config), name)) for name in values}
        new = {name: value for name, value in values.items() if value != getattr(sections[name], name)}
        return ChangedRun(self.config.with_values(new), {**self.values, **new}) if new else self

    def and_preset(self, name: str, *, seq_length: int | None = None) -> ChangedRun | None:
        """With another preset as well; None where that is of another kind of model.

        Args:
            name: of the preset.
            seq_length: of the run, which a preset with fewer positions cuts to as many. None: that of the preset.
        """
        config = self.config
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
        resolved = model.resolve(seq_length=length, vocab_size=config.model.vocab_size)
        dense: dict[str, Any] = {} if bert is not None else {"experts": ExpertsConfig()}  # those of a preset go with it
        data = dataclasses.replace(config.data, seq_length=length)
        named = {} if length == usual == config.data.seq_length else {"seq_length": length}
        changed = dataclasses.replace(config, model=resolved, data=data, **dense)
        return ChangedRun(changed, {**self.values, "preset": name, **named})

    def with_its_batch(self) -> ChangedRun:
        """With a flag for the global batch, where it would have another default: one microbatch for each replica."""
        if self.config.microbatches == 1 or not self.values.keys() & {"micro_batch_size", "dp"}:
            return self
        return ChangedRun(self.config, {**self.values, "global_batch_size": self.config.training.global_batch_size})

    @property
    def flags(self) -> str:
        """The change as the end of a command line, where it replaces the flags of the same names."""
        return " ".join(flag_and_value(name, value) for name, value in self.values.items())


# ---- the memory that there is ----------------------------------------------------------------------------------------


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

    def fits(self, config: ResolvedConfig) -> bool:
        """Whether all ranks of a configuration have what they are expected to take."""
        most = self.memory.available / self.sharing(config.parallel.ranks)
        if (self.host is not None and uses_host(config)) or self.torch_is_loaded:
            demand = self.demand(config)
            return demand.computing <= most and self.host_allows(demand)
        fullest = fullest_rank(
            config, outline(config), on_cpu=self.on_cpu, limit=most, copies_logits=self._copies_logits
        )
        return fullest.expected <= most

    @property
    def _copies_logits(self) -> bool:
        return self.cluster is not None and self.cluster.software.copies_logits

    def sharing(self, ranks: int) -> int:
        """How many of the ranks of a run share the memory."""
        return min(ranks, self.local_ranks) if self.on_cpu else 1

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
