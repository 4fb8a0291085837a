"""What must hold between the sections of a configuration: one row or function per rule, by subject. Rules within a
section are in its class, and those of an entry point's kind in that (bert.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megacore.config.dimensions import DIMENSIONS, ROLES, degree_fields, fill_degrees, named_degrees, size_of_role
from megacore.config.flags import field_of_optimizer
from megacore.config.fp8 import FP8_RULES
from megacore.config.lora import LORA_RULES
from megacore.config.messages import counted, divisors, number
from megacore.config.optimizers import OPTIMIZERS, sections_read
from megacore.config.pipeline_layout import parse_layout
from megacore.config.problem import WORLD_SIZE, Change, Problem, Values, Way, divisors_of, multiples_of, up_to
from megacore.config.rampup import ramp_problems
from megacore.config.reproducible import REPRODUCIBLE_RULES
from megacore.config.rules import FURTHER, AtMost, Divides, Rule, Settings, larger, rows, use
from megacore.config.schema import DECIDE_SEQUENCES, Config, sections_of
from megacore.config.spelling import OWNERS, PARAMETERS, flag, flag_and_value


def settings_of(config: Config, world_size: int = 1, wrong: frozenset[str] = frozenset()) -> Settings:
    """A configuration as rules read it, with the number of processes; `wrong` as for `Settings`."""
    sections = [getattr(config, name) for name in sections_of(type(config))]
    return Settings(sections, wrong, config=config, world_size=world_size)


# ---- ranks and what they divide --------------------------------------------------------------------------------------


def _processes(c: Settings) -> Iterator[str]:
    """The product of the degrees is the number of processes, or divides it where one is left open."""
    given = {name: degree for name in degree_fields() if (degree := getattr(c, name)) is not None}
    given = {name: degree for name, degree in given.items() if name in named_degrees(given)}
    product, world_size = math.prod(given.values()), c.world_size
    processes = f"the run has {counted(world_size, 'process', 'processes')}{c.beside}"
    equation = f"{' x '.join(map(c.given, given))} = {product}"
    # Of each field: the processes that the other degrees leave it, if they are a whole number.
    left = {
        name: world_size // (product // degree)
        for name, degree in given.items()
        if world_size % (product // degree) == 0
    }
    last = degree_fields()[-1]
    if last in given and product != world_size:
        yield Problem(
            f"{equation}, but {processes}",
            divisors_of(last, given[last], left.get(last, world_size)),
            c.out(last) if last in left else None,
            Values(name=WORLD_SIZE, among=[product], near=world_size, spares=c.spares),
            *(divisors_of(name, given[name], left.get(name, world_size)) for name in given if name != last),
        )
    if last not in given and world_size % product:
        yield Problem(
            f"{equation} must divide the number of processes, but {processes}",
            *(divisors_of(name, degree, left.get(name, world_size)) for name, degree in given.items() if degree > 1),
            replace(multiples_of(WORLD_SIZE, world_size, product), spares=c.spares),
            about=(last,),
        )


def _shards(c: Settings) -> Iterator[str]:
    """The ranks that ZeRO shards over are all replicas, or groups of the same size."""
    size, replicas = c.zero_shard_size, size_of_role("replicas", fill_degrees(c, c.world_size))
    if size is not None and replicas % size:
        possible = [count for count in divisors(replicas, most=None) if count > 1] if replicas else []
        is_open = getattr(c, degree_fields()[-1]) is None
        replicated = 2 * size // math.gcd(size, c.cp)
        yield Problem(
            f"--zero-shard-size {size} must divide the number of --dp x --cp ranks, {replicas}",
            Values(name="zero_shard_size", among=possible, near=size, bare=True),
            None if possible else c.without("zero_shard_size"),
            Change(f"give --dp, as in --dp {replicated} of a plan") if is_open and replicas == c.cp else None,
            about=degree_fields(),
        )


def _groups(c: Settings) -> Iterator[str]:
    """Ranks divide the groups of heads, or ranks of one group divide its rows."""
    tp, groups, rows = c.tp, c.query_groups, 2 * c.head_size  # rows: key and value of a group
    if c.num_query_groups is None or c.num_attention_heads % groups or c.num_attention_heads % tp:
        return  # no groups, or another rule reports it

    def fits(ranks: int) -> bool:
        return groups % ranks == 0 or (ranks % groups == 0 and rows % (ranks // groups) == 0)

    if not fits(tp):
        accepted = [ranks for ranks in divisors(c.num_attention_heads, most=None) if fits(ranks)]
        yield Problem(
            f"--tp {tp} must divide --num-query-groups {groups}, or be a multiple of it that divides the {rows} rows "
            "of each group's key and value",
            Values(name="tp", among=accepted, near=tp),
        )


def _convolved(c: Settings) -> Iterator[str]:
    """A rank of context parallelism hands the next chunk what its convolution reads of this one."""
    length, cp, tail = c.seq_length, c.cp, c.linear_conv_kernel_dim - 1
    if c.has_linear and cp > 1 and not c.reproducible and length // (2 * cp) < tail:
        fitting = [ranks for ranks in divisors(length, most=None) if ranks == 1 or length // (2 * ranks) >= tail]
        yield Problem(
            f"--cp {cp} divides --seq-length {length} into chunks of {length // (2 * cp)}, fewer than the {tail} "
            "earlier positions that linear attention convolves",
            Values(name="cp", among=fitting, near=cp),
        )


def _ffn(c: Settings) -> Iterator[str]:
    tp, ffn = c.tp, c.inner_size
    if ffn % tp:
        derived = "" if c.ffn_hidden_size else " (4 x --hidden-size)"
        yield Problem(
            f"--tp {tp} must divide --ffn-hidden-size {ffn}{derived}",
            divisors_of("tp", tp, ffn),
            multiples_of("ffn_hidden_size", ffn, tp),
        )


def _sequence_split(c: Settings) -> Iterator[str]:
    """Ranks that share a sequence hold equal parts of it."""
    length, tp, cp, split = c.seq_length, c.tp, c.cp, bool(c.sequence_parallel)
    if cp > 1 and length % (unit := c.sequence_unit(sequence_parallel=split)):
        tried = {
            ranks: replace(c.config.parallel, cp=ranks) for ranks in divisors(length, most=None) if ranks <= 2 * cp
        }
        fitting = [
            ranks for ranks, other in tried.items() if length % other.sequence_unit(sequence_parallel=split) == 0
        ]
        over = f", --sequence-parallel and --tp {tp}" if split and tp > 1 else ""
        yield Problem(
            f"--seq-length {length} must be a multiple of {unit} with --cp {cp}{over}",
            multiples_of("seq_length", length, unit),
            Values(name="cp", among=fitting, near=cp),
        )
    elif split and length % tp:
        yield Problem(
            f"--tp {tp} must divide --seq-length {length} with --sequence-parallel",
            multiples_of("seq_length", length, tp),
            divisors_of("tp", tp, length),
            Change("leave --sequence-parallel out", {"sequence_parallel": None}),
        )


def _heads_of_context(c: Settings) -> Iterator[str]:
    if c.cp_comm == "ulysses":
        yield from undivided_heads(c.num_attention_heads, c.query_groups, tp=c.tp, cp=c.cp)


def undivided_heads(heads: int, groups: int, *, tp: int, cp: int) -> Iterator[Problem]:
    """Why --cp-comm ulysses cannot exchange the heads of a tp rank; layers that are built from Python ask too."""
    held = max(groups // tp, 1)
    if cp > 1 and heads % tp == 0 and (heads // tp % cp or (held % cp and cp % held)):
        yield Problem(
            f"--cp-comm ulysses divides the {counted(heads // tp, 'query head')} and {counted(held, 'key head')} of a "
            f"tp rank over --cp {cp}, which must divide the former, and divide the latter or be a multiple of it",
            use("cp_comm", "ring"),
            use("cp_comm", "allgather"),
            divisors_of("cp", cp, heads // tp),
        )


def _stages(c: Settings) -> Iterator[str]:
    """Every stage of the pipeline has a block, or the layers that a layout gives it."""
    pp, virtual, layers = c.pp, c.virtual_stages, c.num_layers
    if c.pipeline_layout is not None:
        try:
            parse_layout(c.pipeline_layout, stages=pp * virtual, blocks=layers)
        except ValueError as error:
            yield f"--pipeline-layout {c.pipeline_layout}: {error}"
    elif pp <= layers < pp * virtual:
        yield Problem(
            f"--pp {pp} x --virtual-stages {virtual} = {pp * virtual} must be at most --num-layers {layers}",
            Values(name="virtual_stages", among=range(layers // pp, 0, -1), near=virtual, bound="or less"),
            Values(name="pp", among=range(layers // virtual, 0, -1), near=pp, bound="or less"),
            Values(name="num_layers", among=range(pp * virtual, pp * virtual + FURTHER), near=layers, bound="or more"),
        )


def _whole_matrices(c: Settings) -> Iterator[str]:
    c.read("optimizer")
    if c.tp > 1:
        settings = c.config.optimizer_settings
        if settings.takes_some_whole and not settings.joins_slices:
            yield Problem(
                f"--optimizer {c.optimizer} needs whole matrices, which --tp {c.tp} splits",
                Values(name="tp", among=[1], near=c.tp),
                Change("use another --optimizer"),
            )


LAYOUT_RULES: Sequence[Rule] = (
    _processes,
    _shards,
    *rows("layout"),
    Divides("tp", "num_attention_heads", multiple=False),
    Divides("tp", "linear_num_key_heads", when=("has_linear=True",)),
    _groups,
    _convolved,
    _ffn,
    _sequence_split,
    _heads_of_context,
    AtMost("pp", "num_layers", when=("pipeline_layout=None",), use=("more",)),
    _stages,
    AtMost("recompute_num_layers", "num_layers", use=("out",)),
    Divides(
        "tp",
        "hidden_size",
        multiple=False,
        why=" with --distribute-saved-activations",
        when=("distribute_saved_activations", "sequence_parallel!=True"),
    ),
    _whole_matrices,
)

# ---- experts ---------------------------------------------------------------------------------------------------------


def _expert_ranks(c: Settings) -> Iterator[str]:
    """The ranks of a stage form blocks of --ep x --etp."""
    experts, tp, ep, etp = c.num_experts, c.tp, c.ep, c.expert_split
    if experts is None:
        return
    if etp not in (1, tp):
        yield Problem(
            f"--etp {etp} must be 1 or --tp {tp}", Values(name="etp", among=sorted({1, tp}), near=etp), c.without("etp")
        )
        return
    degrees = fill_degrees(c, c.world_size)
    block = degrees["dp"] * degrees["cp"] * tp
    if block and block % (ep * etp):
        product = " x ".join(f"--{name} {degrees[name]}" for name in ("dp", "cp", "tp") if degrees[name] > 1)
        given = f"--ep {ep} x --etp {etp} = {ep * etp}" if etp > 1 else f"--ep {ep}"
        ranks = f"{block} ranks of a stage ({product})" if block > 1 else "only rank of a stage"
        replicas, others = degrees["dp"], block // degrees["dp"]
        larger = ep * etp // math.gcd(ep * etp, others)
        yield Problem(
            f"{given} must divide the {ranks}",
            divisors_of("ep", ep, block // etp) if block % etp == 0 else None,
            multiples_of("dp", replicas, larger),
            replace(multiples_of(WORLD_SIZE, c.world_size, larger * others * c.pp), spares=c.spares),
            about=("dp", *(("etp",) if c.etp is None else ())),
        )


def _tokens_of_ranks(c: Settings) -> Iterator[str]:
    c.read(*DECIDE_SEQUENCES)  # on accelerators they decide --sequence-parallel
    if c.num_experts is not None and c.expert_split == 1 < c.tp and not c.sequence_parallel:
        yield Problem(
            f"--etp 1 with --tp {c.tp} needs --sequence-parallel, because otherwise every tp rank has the same tokens",
            Change("add it", {"sequence_parallel": True}),
            Values(name="etp", among=[c.tp], near=1),
        )


def _widths(c: Settings) -> Iterator[str]:
    if c.num_experts is None:
        return
    split, width = c.expert_split, c.moe_ffn_hidden_size or c.inner_size
    if width % split:
        name = "--moe-ffn-hidden-size" if c.moe_ffn_hidden_size else "--ffn-hidden-size"
        yield Problem(
            f"--etp {split} must divide {name} {width}",
            multiples_of("moe_ffn_hidden_size", width, split),
            divisors_of("tp", c.tp, width) if split == c.tp else None,
            Values(name="etp", among=[1], near=split),
        )


EXPERT_RULES: Sequence[Rule] = (
    Divides("ep", "num_experts"),
    _expert_ranks,
    _tokens_of_ranks,
    _widths,
    Divides("tp", "moe_shared_expert_size", when=("num_experts",)),
    AtMost(
        "moe_first_dense_layers",
        "num_layers",
        strict=True,
        least=0,
        use=("leave --num-experts and --moe-layer-freq first-dense-layers out",),
        when=("num_experts",),
    ),
    *rows("of_experts"),
)

# ---- batch -----------------------------------------------------------------------------------------------------------


def _batch(c: Settings) -> Iterator[str]:
    """All replicas have the same number of microbatches."""
    micro, batch = c.micro_batch_size, c.global_batch_size
    degrees = fill_degrees(c, c.world_size)
    replicas = size_of_role("batch", degrees)  # 0: too few processes, which _processes reports
    if batch is None or not replicas or batch % (micro * replicas) == 0:
        return
    sharing = [d for d in DIMENSIONS if d.divides in ROLES["batch"] and isinstance(d.degree, str)]
    given = {str(d.degree): degree for d in sharing if (degree := getattr(c, str(d.degree))) is not None}
    factors = " x ".join(
        flag_and_value(str(d.degree), degrees[d.name]) + ("" if d.degree in given else " (derived)") for d in sharing
    )
    yield Problem(
        f"--global-batch-size {batch} must be a multiple of --micro-batch-size {micro} x {factors} "
        f"= {micro * replicas}",
        multiples_of("global_batch_size", batch, micro * replicas, bare=True),
        divisors_of("micro_batch_size", micro, batch // replicas) if batch % replicas == 0 else None,
        *(
            divisors_of(name, degree, batch // others)
            for name, degree in given.items()
            if batch % (others := micro * replicas // degree) == 0
        ),
        about=() if len(given) == len(sharing) else degree_fields(),
    )


def _ramp(c: Settings) -> Iterator[str]:
    if c.rampup_batch_size:
        samples = c.micro_batch_size * size_of_role("batch", fill_degrees(c, c.world_size))
        yield from ramp_problems(c.given("rampup_batch_size"), c.ramp(), c.global_batch_size, samples, c.train_iters)


def _gradient_noise(c: Settings) -> Iterator[str]:
    """It compares gradients of batches of two sizes."""
    small = c.micro_batch_size * size_of_role("batch", fill_degrees(c, c.world_size))
    batch = c.global_batch_size or small
    if c.gradient_noise_interval and small and batch <= small:  # 0: too few processes, which _processes reports
        yield Problem(
            f"{c.given('gradient_noise_interval')} compares the gradient of one microbatch per replica with that of "
            "all of them, and there is one",
            Values(
                name="global_batch_size",
                among=range(2 * small, 2 * small + FURTHER),
                near=batch,
                bound="or more",
                most=3,
            ),
            up_to("micro_batch_size", c.micro_batch_size, batch // (2 * small // c.micro_batch_size)),
            about=("micro_batch_size", *degree_fields()),
        )


BATCH_RULES: Sequence[Rule] = (
    _batch,
    _ramp,
    *rows("batch"),
    _gradient_noise,
)

# ---- number of steps -------------------------------------------------------------------------------------------------


def _schedule(c: Settings) -> Iterator[str]:
    """The parts of the learning-rate schedule follow each other within its length."""
    c.read("train_iters", "global_batch_size", "rampup_batch_size")
    end, warmup, final, iters = c.config.lr_decay_iters, c.lr_warmup_iters, c.lr_wsd_decay_iters, c.train_iters
    name = "lr_decay_iters" if c.lr_decay_iters else "train_iters"
    length = f"{flag(name)} {end}"
    if not c.lr_decay_iters and end != iters:  # a schedule in full batches
        ramp = " ".join(c.rampup_batch_size)
        length = f"the {end} full batches of --train-iters {iters} with --rampup-batch-size {ramp}"
    if warmup >= end:
        rises = c.lr_decay_style == "1cycle"  # whose warm-up has a step at least
        less: Way = up_to("lr_warmup_iters", warmup, end - 1, low=1 if rises else 0)
        if tenth := end // 10:
            less = Change(f"{tenth} (a tenth)", {"lr_warmup_iters": tenth})
        yield Problem(f"--lr-warmup-iters {warmup} must be below {length}", less, larger(name, warmup))
    elif c.lr_decay_style == "WSD" and final is not None and warmup + final > end:
        yield Problem(
            f"--lr-warmup-iters {warmup} + --lr-decay-style wsd-decay-iters={final} = {warmup + final} must be at "
            f"most {length}",
            Values(name="lr_wsd_decay_iters", among=range(end - warmup, 0, -1), near=final, bound="or less"),
        )


def schedule_problems(config: Config) -> list[str]:
    """What is wrong with the lengths of the parts of the learning-rate schedule beside each other."""
    return [*settings_of(config).violated([_schedule])]


def _range_test(c: Settings) -> Iterator[str]:
    if c.lr_range_test and c.train_iters < 10:
        way = Change(f"--train-iters 100 instead of {c.train_iters}", {"train_iters": 100})
        yield Problem("--lr-range-test needs 10 steps or more", way)


def _traced(c: Settings) -> Iterator[str]:
    steps, last = c.trace_steps, c.train_iters
    most = max(last - 1, 1)  # the first step is not traced, unless it is the only one
    if c.trace and steps is not None and steps > most:
        yield Problem(
            f"--trace steps={steps} must be at most {most} with --train-iters {last}, because the trace begins after "
            "the first step",
            Values(name="trace_steps", among=range(most, 0, -1), near=steps, bound="or less"),
            larger("train_iters", steps),
        )


def _profiled(c: Settings) -> Iterator[str]:
    try:
        profiled, last = c.profiled_steps(), c.train_iters
    except ValueError:  # the section reports it
        return
    if profiled and profiled[-1] > last:
        within = f"{min(profiled[0], last)}:{last}"
        yield Problem(
            f"--profile-steps {c.profile_steps} must end within --train-iters {last}",
            Change(f"--profile-steps {within}", {"profile_steps": within}),
            larger("train_iters", profiled[-1]),
        )


def _idle_guard(c: Settings) -> Iterator[str]:
    """The guard against spikes has enough steps to begin."""
    last, half = c.train_iters, c.spike_window // 2
    if c.on_spike == "none" or (c.on_spike == "warn" and not c.is_set("spike_window")):
        return
    said = f"--on-spike {c.on_spike} has no effect in {counted(last, 'step')} (--train-iters): the guard"
    if half >= last:
        yield Problem(
            f"{said} needs {half} accepted steps, half of --on-spike window={c.spike_window}",
            Values(name="spike_window", among=range(2 * last - 1, 3, -1), near=c.spike_window, bound="or less"),
            larger("train_iters", half),
        )
    elif c.lr_warmup_iters >= last:
        yield Problem(
            f"{said} begins after --lr-warmup-iters {c.lr_warmup_iters}",
            Change("a smaller one", {"lr_warmup_iters": 0}),
            larger("train_iters", c.lr_warmup_iters),
        )


# The length that a style of the learning rate needs, as tenths of --train-iters.
_LENGTHS = {
    "1cycle": ("lr_warmup_iters", 3, "a rise"),
    "WSD": ("lr_wsd_decay_iters", 1, "the length of its final decay"),
    "cosine-restarts": ("lr_restart_iters", 2, "the length of its first cycle"),
}


def _lengths(c: Settings) -> Iterator[str]:
    name, tenths, what = _LENGTHS.get(c.lr_decay_style, ("", 0, ""))
    if name and not getattr(c, name):
        yield Problem(f"{c.given('lr_decay_style')} needs {what}", use(name, max(c.train_iters * tenths // 10, 1)))


DURATION_RULES: Sequence[Rule] = (
    _schedule,
    _lengths,
    *rows("steps"),
    _range_test,
    _traced,
    _profiled,
    AtMost("replay_interval", "train_iters", why=", because no step would be replayed", use=("out",)),
    AtMost(
        "check_replicas_interval",
        "train_iters",
        why=", because only saves would be checked",
        use=("out",),
        when=("check_replicas_interval",),
    ),
    _idle_guard,
    AtMost(
        "save_interval",
        "train_iters",
        strict=True,
        why=" with --on-spike rollback, because there would be no checkpoint to return to",
        use=("larger",),
        when=("on_spike=rollback", "load=None"),
    ),
    AtMost("spike_skip_batches", "train_iters", when=("on_spike=rollback", "spike_skip_batches")),
    AtMost("max_rollbacks", "train_iters", when=("on_spike=rollback", "max_rollbacks")),
)

# ---- data and the weights that a run starts from ---------------------------------------------------------------------


def _vocabulary(c: Settings) -> Iterator[str]:
    c.read("preset")
    # Whatever is wrong with the data; a config.json has the size, or is refused.
    if c.vocab_size is None and c.init_from_hf is None and c.tokenizer is None:
        source = "--mock-data" if c.config.data.mock_data else "--data-path"
        yield Problem(f"{source} needs a vocabulary", Change("use --tokenizer PATH"), use("vocab_size", 50304))


DATA_RULES: Sequence[Rule] = (
    _vocabulary,
    AtMost("seq_length", "max_position_embeddings", use=("more",)),
    *rows("start"),
)

# ---- optimizer and number formats ------------------------------------------------------------------------------------


def idle_optimizers(config: Config) -> list[str]:
    """The sections of optimizers that the chosen one does not read; none, where it is not known."""
    if config.optimizer.optimizer not in OPTIMIZERS:
        return []
    read, sections = sections_read(config.optimizer.optimizer), sections_of(type(config))
    return [name for name in OPTIMIZERS if name not in read and name in sections]


def _idle_optimizers(c: Settings) -> Iterator[str]:
    """Settings of an optimizer that is not chosen have no effect, whatever they are."""
    chosen, config = c.optimizer, c.config
    idle = {section: names for section in idle_optimizers(config) if (names := getattr(config, section).set_fields)}
    for section, names in idle.items():
        # Settings of two optimizers need two others: none is proposed.
        other = use("optimizer", section) if len(idle) == 1 else None
        for name in names:
            fields = PARAMETERS["optimizer"].get(OWNERS.get(name, ("", ""))[1], (name,))
            # --optimizer beta1=0.8 would mean AdamW's with --optimizer adamw.
            own = name != field_of_optimizer(fields, chosen, type(config))
            said = f"{flag_and_value(name, config.value(name), own=own)} has no effect with --optimizer {chosen}"
            yield Problem(said, c.without(name), other, only=(name,))


def _moments(c: Settings) -> Iterator[str]:
    # Others than AdamW and its kin have no use for [adamw] at all.
    if c.optimizer != "adamw" and c.moments_dtype != "fp32" and "adamw" in c.config.optimizer_settings.shares:
        yield Problem(
            f"--optimizer moments-dtype={c.moments_dtype} is not possible with --optimizer {c.optimizer}",
            c.without("moments_dtype"),
            use("optimizer", "adamw"),
        )


def _mup(c: Settings) -> Iterator[str]:
    """What muP does not go together with."""
    for name, value in c.multipliers(c).items():
        if c.is_set(name) and getattr(c, name) != value:
            given, found = c.given("mup_base_width"), number(getattr(c, name))
            yield f"{given} sets {flag_and_value(name, value)} and not {found}: leave one of the flags out"


OPTIMIZER_RULES: Sequence[Rule] = (
    _idle_optimizers,
    _moments,
    *rows("of_optimizer"),
    _mup,
)

COMPRESSION_RULES: Sequence[Rule] = (
    *rows("compression"),
    AtMost(
        "onebit_freeze_step",
        "train_iters",
        strict=True,
        why=", because nothing would be compressed",
        use=("larger",),
        when=("optimizer=onebitadam|onebitlamb",),
    ),
)

RULES: Sequence[Rule] = (
    *EXPERT_RULES,
    *REPRODUCIBLE_RULES,
    *FP8_RULES,
    *LORA_RULES,
    *COMPRESSION_RULES,
    *LAYOUT_RULES,
    *BATCH_RULES,
    *DURATION_RULES,
    *DATA_RULES,
    *OPTIMIZER_RULES,
    *rows("survival"),
)
"""Those of every entry point, in the order in which they are named."""
