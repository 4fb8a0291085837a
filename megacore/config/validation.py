"""What must hold between the fields of a configuration: every violated constraint, each with the way out.

A section validates its fields (`Section.wrong_fields`, `Section.constraints`). The functions below check what must
hold between sections. missing_files.py asks the disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megacore.config.checkpoint import AUTO
from megacore.config.compression import COMPRESSION_RULES
from megacore.config.dimensions import DIMENSIONS, ROLES, degree_fields, fill_degrees, named_degrees, size_of_role
from megacore.config.expert_rules import EXPERT_RULES
from megacore.config.fields import Section, field_infos, flag_and_value
from megacore.config.messages import at_most, counted, divisors, number
from megacore.config.mup import mup_problems
from megacore.config.optimizers import OptimizerSettings
from megacore.config.parallel import ParallelConfig
from megacore.config.pipeline_layout import parse_layout
from megacore.config.problem import WORLD_SIZE, Change, Problem, Values, divisors_of, multiples_of, up_to
from megacore.config.proposals import with_tried_ways
from megacore.config.rampup import ramp_problems
from megacore.config.reproducible import REPRODUCIBLE_RULES
from megacore.config.schema import Config, sections_of

_FURTHER = 64  # values beyond a bound that are tried


def validate(
    config: Config,
    world_size: int,
    *,
    unread: frozenset[str] = frozenset(),
    follows_degrees: bool = False,
    further: Callable[[Config], list[str]] | None = None,
) -> list[str]:
    """Names every violated constraint of a configuration, resolved or not.

    Args:
        config: the configuration to check; none of its values need be valid.
        world_size: the number of processes of the run.
        unread: fields that were given a value which could not be read. Constraints on them are not checked.
        follows_degrees: the run is planned for as many processes as its degrees say; other degrees change their number.
        further: constraints of the caller.

    Returns:
        One message per problem. It names the flags, their values, the constraint and the ways out, which are tried on
        all constraints.
    """

    def found_in(one: Config, ranks: int) -> list[str]:
        return [*(further(one) if further else ()), *violations(one, ranks, unread=unread)]

    def recheck(changes: Mapping[str, Any]) -> list[str]:
        values = dict(changes)
        given = values.pop(WORLD_SIZE, world_size)
        changed = _with_values(config, values)
        ranks = degrees_product(changed) if follows_degrees else given
        return found_in(changed, ranks)

    found = found_in(config, world_size)
    return with_tried_ways(found, recheck, processes=None if follows_degrees else world_size) if found else []


def degrees_product(config: Config) -> int:
    """The number of processes that the given degrees ask for."""
    given = (getattr(config.parallel, name) for name in degree_fields())
    return math.prod(degree for degree in given if isinstance(degree, int) and degree > 0)


def _with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values of fields, by name."""
    sections = {}
    for name, kind in sections_of(type(config)).items():
        if changed := {field: value for field, value in values.items() if field in field_infos(kind)}:
            sections[name] = replace(getattr(config, name), **changed)
    return replace(config, **sections)


def violations(config: Config, world_size: int, *, unread: frozenset[str] = frozenset()) -> list[str]:
    """As `validate`, but no way out is tried: for callers that ask whether a configuration is valid.

    Args:
        config: the configuration to check; none of its values need be valid.
        world_size: the number of processes of the run.
        unread: fields that were given a value which could not be read.
    """
    sections: list[Section] = [getattr(config, name) for name in sections_of(type(config))]
    wrong_by_section = [section.wrong_fields() for section in sections]
    wrong = unread.union(*wrong_by_section)
    refused = config.wrong_fields(wrong)
    wrong |= refused.keys()
    problems = list(refused.values())
    for section, messages in zip(sections, wrong_by_section, strict=True):
        problems += [message for name, message in messages.items() if name not in unread]
        problems += section.constraints(wrong)
    for names, constraint in _CONSTRAINTS:
        if not names & wrong:
            problems += constraint(config, world_size)
    return [*problems, *config.constraints(wrong)]


# ---- constraints between sections ------------------------------------------------------------------------------------

_Constraint = Callable[[Config, int], Iterator[str]]
_CONSTRAINTS: list[tuple[frozenset[str], _Constraint]] = [
    *EXPERT_RULES,
    *REPRODUCIBLE_RULES,
    *COMPRESSION_RULES,
]


def _about(*names: str) -> Callable[[_Constraint], _Constraint]:
    """Registers a constraint. It is checked only if the value of each of these fields is valid by itself."""

    def register(constraint: _Constraint) -> _Constraint:
        _CONSTRAINTS.append((frozenset(names), constraint))
        return constraint

    return register


@_about("tp", "cp", "seq_length", "sequence_parallel")
def _sequence_split(config: Config, world_size: int) -> Iterator[str]:
    parallel, length = config.parallel, config.data.seq_length
    tp, cp, split = parallel.tp, parallel.cp, bool(parallel.sequence_parallel)
    if cp > 1 and length % (unit := parallel.sequence_unit(sequence_parallel=split)):
        tried = {ranks: replace(parallel, cp=ranks) for ranks in divisors(length, most=None) if ranks <= 2 * cp}
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


@_about("cp", "attention_dropout", "reproducible")
def _attention_dropout_of_context(config: Config, world_size: int) -> Iterator[str]:
    cp, dropout = config.parallel.cp, config.model.attention_dropout
    if cp > 1 and dropout and not config.training.reproducible:  # whose masks belong to blocks of heads
        yield Problem(
            f"--attention-dropout {number(dropout)} is not possible with --cp {cp}, because its ranks would draw "
            "other masks than one process",
            Change("--attention-dropout 0 (--hidden-dropout works)", {"attention_dropout": 0.0}),
            Change("--reproducible", {"reproducible": True}),
            Values(name="cp", among=[1], near=cp),
        )


@_about("cp", "cp_comm", "tp", "num_attention_heads", "num_query_groups")
def _heads_of_context(config: Config, world_size: int) -> Iterator[str]:
    parallel, heads, groups = config.parallel, config.model.num_attention_heads, config.model.query_groups
    tp, cp = parallel.tp, parallel.cp
    if cp == 1 or parallel.cp_comm != "ulysses" or heads % tp:
        return
    held = max(groups // tp, 1)
    if heads // tp % cp or (held % cp and cp % held):
        yield Problem(
            f"--cp-comm ulysses divides the {counted(heads // tp, 'query head')} and {counted(held, 'key head')} of a "
            f"tp rank over --cp {cp}, which must divide the former, and divide the latter or be a multiple of it",
            Change("--cp-comm ring", {"cp_comm": "ring"}),
            Change("--cp-comm allgather", {"cp_comm": "allgather"}),
            divisors_of("cp", cp, heads // tp),
        )


@_about("cp", "attention", "reproducible")
def _attention_of_context(config: Config, world_size: int) -> Iterator[str]:
    fused = config.training.attention == "fused-softmax"
    if config.parallel.cp > 1 and fused and not config.training.reproducible:  # which computes whole sequences
        yield Problem(
            f"--attention fused-softmax is not possible with --cp {config.parallel.cp}, because it needs all keys of "
            "a row at once",
            Change("--attention sdpa", {"attention": "sdpa"}),
            Values(name="cp", among=[1], near=config.parallel.cp),
        )


@_about("reset_position_ids", "reset_attention_mask", "packing", "position_embedding_type")
def _positions_of_documents(config: Config, world_size: int) -> Iterator[str]:
    if config.data.beside_tokens == ("positions",) and config.model.position_embedding_type == "alibi":
        yield (
            "--reset-position-ids has no meaning with --position-embedding-type alibi, which goes by distances, unless "
            "attention stays within documents: use --reset-attention-mask too, or leave it out"
        )


@_about("skip_train", "train_data_path", "valid_data_path", "data_path", "valid_sets")
def _evaluated_data(config: Config, world_size: int) -> Iterator[str]:
    data = config.data
    if config.training.skip_train and data.is_split and not data.valid_data_path and not data.valid_sets:
        yield (
            "--skip-train evaluates, and --train-data-path has no validation data beside it: use --valid-data-path or "
            "--valid-sets"
        )


@_about("valid_sets", "eval_interval")
def _evaluated_sets(config: Config, world_size: int) -> Iterator[str]:
    if config.data.valid_sets and config.training.eval_interval == 0:
        yield "--valid-sets has no effect with --eval-interval 0, which turns evaluation off: leave one of them out"


@_about("skip_train", "lr_range_test")
def _evaluated_range(config: Config, world_size: int) -> Iterator[str]:
    if config.training.skip_train and config.optimizer.lr_range_test:
        yield "--lr-range-test trains, and --skip-train does not: leave one of them out"


@_about("tp", "num_attention_heads")
def _heads(config: Config, world_size: int) -> Iterator[str]:
    tp, heads = config.parallel.tp, config.model.num_attention_heads
    if heads % tp:
        said = f"--tp {tp} must divide --num-attention-heads {heads}"
        yield Problem(said, divisors_of("tp", tp, heads, bare=True))


@_about("tp", "num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")
def _groups(config: Config, world_size: int) -> Iterator[str]:
    tp, groups, model = config.parallel.tp, config.model.query_groups, config.model
    if model.num_query_groups is None or model.num_attention_heads % groups or model.num_attention_heads % tp:
        return  # no groups, or another constraint reports it
    rows = 2 * model.head_size  # key and value of a group

    def fits(ranks: int) -> bool:
        return groups % ranks == 0 or (ranks % groups == 0 and rows % (ranks // groups) == 0)

    if not fits(tp):
        accepted = [ranks for ranks in divisors(model.num_attention_heads, most=None) if fits(ranks)]
        yield Problem(
            f"--tp {tp} must divide --num-query-groups {groups}, or be a multiple of it that divides the {rows} rows "
            "of each group's key and value",
            Values(name="tp", among=accepted, near=tp),
        )


@_about("tp", "hidden_size", "ffn_hidden_size")
def _ffn(config: Config, world_size: int) -> Iterator[str]:
    tp, ffn = config.parallel.tp, config.model.inner_size
    if ffn % tp:
        derived = "" if config.model.ffn_hidden_size else " (4 x --hidden-size)"
        yield Problem(
            f"--tp {tp} must divide --ffn-hidden-size {ffn}{derived}",
            divisors_of("tp", tp, ffn),
            multiples_of("ffn_hidden_size", ffn, tp),
        )


@_about("on_spike", "save_interval")
def _rollback(config: Config, world_size: int) -> Iterator[str]:
    if config.spikes.on_spike == "rollback" and config.checkpoint.save_interval is None:
        yield (
            "--on-spike rollback needs checkpoints to return to: use --save-interval, for example with 100, or "
            "--on-spike skip"
        )


@_about("on_spike", "max_bad_steps")
def _rollback_first(config: Config, world_size: int) -> Iterator[str]:
    if config.spikes.on_spike == "rollback" and config.training.max_bad_steps == 1:
        yield (
            "--on-spike rollback needs --max-bad-steps 2 or more: with 1 the first spike ends the run, before it can "
            "go back"
        )


@_about("reproducible", "grad_reduce_dtype")
def _reproducible(config: Config, world_size: int) -> Iterator[str]:
    if config.training.reproducible and config.precision.grad_reduce_dtype != "fp32":
        yield (
            f"--reproducible needs exact sums of gradients, but --grad-reduce-dtype "
            f"{config.precision.grad_reduce_dtype} rounds them: use --grad-reduce-dtype fp32, or leave --reproducible "
            "out"
        )


@_about("recompute_num_layers", "num_layers")
def _recomputed(config: Config, world_size: int) -> Iterator[str]:
    recomputed, layers = config.training.recompute_num_layers, config.model.num_layers
    if recomputed is not None and recomputed > layers:
        yield Problem(
            f"--recompute-num-layers {recomputed} must be at most --num-layers {layers}",
            up_to("recompute_num_layers", recomputed, layers),
            Change("leave it out to recompute all of them", {"recompute_num_layers": None}),
        )


@_about("distribute_saved_activations", "tp", "sequence_parallel", "hidden_size")
def _distributed_inputs(config: Config, world_size: int) -> Iterator[str]:
    tp, hidden, flag = config.parallel.tp, config.model.hidden_size, "--distribute-saved-activations"
    if not config.training.distribute_saved_activations:
        return
    if tp == 1:
        yield Problem(
            f"{flag} has no effect with --tp 1",
            Change("leave it out", {"distribute_saved_activations": False}),
            Values(name="tp", among=range(2, 34), near=tp, bound="or more"),
        )
    elif config.parallel.sequence_parallel:
        yield f"{flag} has no effect with --sequence-parallel, which divides the inputs anyway: leave one of them out"
    elif hidden % tp:
        yield Problem(f"{flag} divides --hidden-size {hidden} over --tp {tp}", divisors_of("tp", tp, hidden))


@_about("pp", "num_layers", "virtual_stages", "pipeline_layout")
def _stages(config: Config, world_size: int) -> Iterator[str]:
    pp, virtual, layers = config.parallel.pp, config.parallel.virtual_stages, config.model.num_layers
    if config.parallel.pipeline_layout is not None:
        try:
            parse_layout(config.parallel.pipeline_layout, stages=pp * virtual, blocks=layers)
        except ValueError as error:
            yield f"--pipeline-layout {config.parallel.pipeline_layout}: {error}"
    elif pp > layers:
        yield Problem(
            f"--pp {pp} must be at most --num-layers {layers}",
            up_to("pp", pp, layers),
            Values(name="num_layers", among=range(pp, pp + _FURTHER), near=layers, bound="or more"),
        )
    elif pp * virtual > layers:
        yield Problem(
            f"--pp {pp} x --virtual-stages {virtual} = {pp * virtual} must be at most --num-layers {layers}",
            Values(name="virtual_stages", among=range(layers // pp, 0, -1), near=virtual, bound="or less"),
            Values(name="pp", among=range(layers // virtual, 0, -1), near=pp, bound="or less"),
            Values(name="num_layers", among=range(pp * virtual, pp * virtual + _FURTHER), near=layers, bound="or more"),
        )


@_about(*degree_fields(), "gradient_noise_interval", "micro_batch_size", "global_batch_size", "trace", "schedule_csv")
def _gradient_noise(config: Config, world_size: int) -> Iterator[str]:
    interval, training, file = config.logging.gradient_noise_interval, config.training, config.parallel.schedule_csv
    if not interval:
        return
    given = f"--gradient-noise-interval {interval}"
    small = training.micro_batch_size * size_of_role("batch", fill_degrees(config.parallel, world_size))
    batch = training.global_batch_size or small
    if batch <= small:
        larger = range(2 * small, 2 * small + _FURTHER)
        yield Problem(
            f"{given} compares the gradient of one microbatch per replica with that of all of them, and there is one",
            Values(
                name="global_batch_size",
                among=larger,
                near=batch,
                bound="or more",
                most=3,
            ),
            Change("use a smaller --micro-batch-size"),
            about=("micro_batch_size", *degree_fields()),
        )
    if config.logging.trace:
        yield f"{given} adds a pass to steps that --trace records: leave one of them out"
    if file is not None:
        yield f"{given} is not possible with --schedule-csv {file}, which has one number of microbatches: leave it out"


@_about("trace_steps", "train_iters")
def _traced(config: Config, world_size: int) -> Iterator[str]:
    steps, last = config.logging.trace_steps, config.training.train_iters
    most = max(last - 1, 1)  # the first step is not traced, unless it is the only one
    if config.logging.trace and steps is not None and steps > most:
        yield Problem(
            f"--trace-steps {steps} must be at most {most} with --train-iters {last}, because the trace begins after "
            "the first step",
            Values(name="trace_steps", among=range(most, 0, -1), near=steps, bound="or less"),
            Change("use a larger --train-iters"),
        )


@_about("profile_steps", "train_iters")
def _profiled(config: Config, world_size: int) -> Iterator[str]:
    try:
        profiled, last = config.logging.profiled_steps(), config.training.train_iters
    except ValueError:  # the section reports it
        return
    if profiled and profiled[-1] > last:
        yield (
            f"--profile-steps {config.logging.profile_steps} must end within --train-iters {last}: use "
            f"--profile-steps {min(profiled[0], last)}:{last}, or a larger --train-iters"
        )


@_about("replay_interval", "check_replicas_interval", "train_iters")
def _check_intervals(config: Config, world_size: int) -> Iterator[str]:
    watch, last = config.watch, config.training.train_iters
    default = field_infos(type(watch))["check_replicas_interval"].default
    if watch.replay_interval > last:
        yield (
            f"--replay-interval {watch.replay_interval} must be at most --train-iters {last}, because no step would be "
            f"replayed: use {last} or less, or leave it out"
        )
    if watch.check_replicas_interval > last and watch.check_replicas_interval != default:
        yield (
            f"--check-replicas-interval {watch.check_replicas_interval} must be at most --train-iters {last}, because "
            f"only saves would be checked: use {last} or less, or leave it out"
        )


@_about("on_spike", "spike_window", "lr_warmup_iters", "train_iters")
def _idle_guard(config: Config, world_size: int) -> Iterator[str]:
    spikes, last, warmup = config.spikes, config.training.train_iters, config.optimizer.lr_warmup_iters
    default = field_infos(type(spikes))["spike_window"].default
    if spikes.on_spike == "none" or (spikes.on_spike == "warn" and spikes.spike_window == default):
        return
    half, given = spikes.spike_window // 2, f"--on-spike {spikes.on_spike}"
    if half >= last:
        most = 2 * last - 1
        smaller = f"use --spike-window {most} or less, or " if most >= 4 else "use "
        yield (
            f"{given} has no effect in {counted(last, 'step')} (--train-iters): the guard needs {half} accepted steps, "
            f"half of --spike-window {spikes.spike_window}: {smaller}a larger --train-iters"
        )
    elif warmup >= last:
        yield (
            f"{given} has no effect in {counted(last, 'step')} (--train-iters): the guard begins after "
            f"--lr-warmup-iters {warmup}: use a smaller one, or a larger --train-iters"
        )


@_about("on_spike", "save_interval", "spike_skip_batches", "max_rollbacks", "train_iters", "load")
def _rollbacks_beyond(config: Config, world_size: int) -> Iterator[str]:
    spikes, last, interval = config.spikes, config.training.train_iters, config.checkpoint.save_interval
    if spikes.on_spike != "rollback":
        return
    if interval is not None and interval >= last and config.checkpoint.load is None:
        below = f"use {last - 1} or less, or " if last > 1 else "use "
        yield (
            f"--save-interval {interval} must be below --train-iters {last} with --on-spike rollback, because there "
            f"would be no checkpoint to return to: {below}a larger --train-iters"
        )
    for name in ("spike_skip_batches", "max_rollbacks"):
        value, default = getattr(spikes, name), field_infos(type(spikes))[name].default
        if value > last and value != default:
            yield f"{flag_and_value(name, value)} must be at most --train-iters {last}: use {last} or less"


@_about(*degree_fields())
def _processes(config: Config, world_size: int) -> Iterator[str]:
    fields, names = field_infos(ParallelConfig), degree_fields()
    given = {name: degree for name in names if (degree := getattr(config.parallel, name)) is not None}
    given = {name: degree for name, degree in given.items() if name in named_degrees(given)}
    product, processes = math.prod(given.values()), f"the run has {counted(world_size, 'process', 'processes')}"
    equation = f"{' x '.join(f'{fields[name].flag} {degree}' for name, degree in given.items())} = {product}"
    # Of each field: the processes that the other degrees leave it, if they are a whole number.
    left = {
        name: world_size // (product // degree)
        for name, degree in given.items()
        if world_size % (product // degree) == 0
    }
    last = names[-1]
    if last in given and product != world_size:
        yield Problem(
            f"{equation}, but {processes}",
            *(divisors_of(name, degree, left.get(name, world_size)) for name, degree in given.items()),
            Change(f"leave {fields[last].flag} out", {last: None}) if last in left else None,
            Values(name=WORLD_SIZE, among=[product], near=world_size),
        )
    if last not in given and world_size % product:
        yield Problem(
            f"{equation} must divide the number of processes, but {processes}",
            *(divisors_of(name, degree, left.get(name, world_size)) for name, degree in given.items() if degree > 1),
            multiples_of(WORLD_SIZE, world_size, product),
            about=(last,),
        )


@_about(*degree_fields(), "zero_shard_size", "num_experts")
def _shards(config: Config, world_size: int) -> Iterator[str]:
    size, degrees = config.parallel.zero_shard_size, fill_degrees(config.parallel, world_size)
    if size is None:
        return
    replicas = size_of_role("replicas", degrees)
    if replicas % size:
        possible = [count for count in divisors(replicas, most=None) if count > 1] if replicas else []
        yield Problem(
            f"--zero-shard-size {size} must divide the number of --dp x --cp ranks, {replicas}",
            Values(name="zero_shard_size", among=possible, near=size, bare=True),
            None if possible else Change("leave it out", {"zero_shard_size": None}),
            about=degree_fields(),
        )
    if config.experts.num_experts is not None:
        yield (
            f"--zero-shard-size {size} is not possible with --num-experts {config.experts.num_experts}, whose experts "
            "have other replicas: leave it out"
        )


@_about(*degree_fields(), "micro_batch_size", "global_batch_size")
def _batch(config: Config, world_size: int) -> Iterator[str]:
    parallel, micro, batch = config.parallel, config.training.micro_batch_size, config.training.global_batch_size
    degrees = fill_degrees(parallel, world_size)
    replicas = size_of_role("batch", degrees)  # 0: too few processes, which _processes reports
    if batch is not None and replicas and batch % (micro * replicas):
        sharing = [d for d in DIMENSIONS if d.divides in ROLES["batch"] and isinstance(d.degree, str)]
        given = {str(d.degree): degree for d in sharing if (degree := getattr(parallel, str(d.degree))) is not None}
        factors = " x ".join(
            f"{field_infos(ParallelConfig)[str(d.degree)].flag} {degrees[d.name]}"
            + ("" if d.degree in given else " (derived)")
            for d in sharing
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


@_about(*degree_fields(), "micro_batch_size", "global_batch_size", "rampup_batch_size", "schedule_csv")
def _ramp(config: Config, world_size: int) -> Iterator[str]:
    if not config.rampup.rampup_batch_size or config.rampup.problems():
        return
    ramp, training, file = config.rampup.ramp(), config.training, config.parallel.schedule_csv
    assert ramp is not None
    replicas = size_of_role("batch", fill_degrees(config.parallel, world_size))
    yield from ramp_problems(ramp, training.global_batch_size, training.micro_batch_size * replicas)
    if file is not None:
        yield (
            f"--rampup-batch-size is not possible with --schedule-csv {file}, which is a schedule of one number of "
            "microbatches: leave one of them out"
        )


@_about("seq_length", "max_position_embeddings")
def _positions(config: Config, world_size: int) -> Iterator[str]:
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if positions is not None and length > positions:
        more = range(length, length + _FURTHER)
        yield Problem(
            f"--seq-length {length} must be at most --max-position-embeddings {positions}",
            up_to("seq_length", length, positions),
            Values(name="max_position_embeddings", among=more, near=positions, bound="or more"),
        )


@_about(
    "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "train_iters", "global_batch_size",
    "rampup_batch_size",
)  # fmt: skip
def _schedule(config: Config, world_size: int) -> Iterator[str]:
    yield from schedule_problems(config)


def schedule_problems(config: Config) -> Iterator[str]:
    """What is wrong with the lengths of the parts of the learning-rate schedule beside each other."""
    optimizer, end = config.optimizer, config.lr_decay_iters
    warmup, final = optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    name = "--lr-decay-iters" if optimizer.lr_decay_iters else "--train-iters"
    length, iters = f"{name} {end}", config.training.train_iters
    if not optimizer.lr_decay_iters and end != iters:  # a schedule in full batches
        ramp = " ".join(config.rampup.rampup_batch_size)
        length = f"the {end} full batches of --train-iters {iters} with --rampup-batch-size {ramp}"
    if warmup >= end:
        rises = optimizer.lr_decay_style == "1cycle"  # whose warm-up has a step at least
        smaller = "" if rises and end == 1 else f"{at_most(end - 1)}, or "
        yield f"--lr-warmup-iters {warmup} must be below {length}: use {smaller}a larger {name}"
    elif optimizer.lr_decay_style == "WSD" and final is not None and warmup + final > end:
        yield (
            f"--lr-warmup-iters {warmup} + --lr-wsd-decay-iters {final} = {warmup + final} must be at most "
            f"{length}: use --lr-wsd-decay-iters {end - warmup} or less"
        )


@_about("lr_range_test", "load", "train_iters")
def _range_test(config: Config, world_size: int) -> Iterator[str]:
    if not config.optimizer.lr_range_test:
        return
    if config.checkpoint.load not in (None, AUTO):
        yield f"--lr-range-test begins with the first step, but --load {config.checkpoint.load} continues: leave it out"
    if config.training.train_iters < 10:
        yield f"--lr-range-test needs 10 steps or more: use --train-iters 100 instead of {config.training.train_iters}"


@_about("optimizer")
def _idle_optimizers(config: Config, world_size: int) -> Iterator[str]:
    chosen_name, settings = config.optimizer.optimizer, config.optimizer_settings
    for name in sections_of(type(config)):
        section = getattr(config, name)
        if isinstance(section, OptimizerSettings) and name not in (chosen_name, *settings.shares):
            wrong, fields = frozenset(section.wrong_fields()), tuple(field_infos(type(section)))
            yield from section.without_effect(fields, wrong, f"--optimizer {chosen_name}", f"--optimizer {name}")


@_about("mup_base_width", "mup_base_head_size", "hidden_size", "num_attention_heads", "kv_channels", "optimizer")
def _mup(config: Config, world_size: int) -> Iterator[str]:
    has_experts = config.experts.num_experts is not None
    yield from mup_problems(config.mup, config.model, config.optimizer.optimizer, has_experts=has_experts)


@_about("optimizer", "moments_dtype")
def _moments(config: Config, world_size: int) -> Iterator[str]:
    chosen, dtype = config.optimizer.optimizer, config.adamw.moments_dtype
    if dtype != "fp32" and "adamw" in config.optimizer_settings.shares:  # others have no use for [adamw] at all
        given = f"--moments-dtype {dtype}"
        yield f"{given} is not possible with --optimizer {chosen}: leave it out, or use --optimizer adamw"


@_about("optimizer", "tp")
def _whole_matrices(config: Config, world_size: int) -> Iterator[str]:
    settings = config.optimizer_settings
    if config.parallel.tp > 1 and settings.takes_some_whole and not settings.joins_slices:
        yield Problem(
            f"--optimizer {config.optimizer.optimizer} needs whole matrices, which --tp {config.parallel.tp} splits",
            Values(name="tp", among=[1], near=config.parallel.tp),
            Change("use another --optimizer"),
        )


@_about("preset", "init_from_hf", "load", "pretrained_checkpoint")
def _start_of_weights(config: Config, world_size: int) -> Iterator[str]:
    source, load, preset = config.checkpoint.init_from_hf, config.checkpoint.load, config.model.preset
    pretrained = config.start.pretrained_checkpoint
    if source is not None and load not in (None, AUTO):
        yield f"--init-from-hf {source} and --load {load} exclude each other: leave one of them out"
    if pretrained is not None and load not in (None, AUTO):
        yield (
            f"--pretrained-checkpoint {pretrained} and --load {load} exclude each other: use --load auto, which "
            "continues this run where it has a checkpoint, or leave one of them out"
        )
    if pretrained is not None and source is not None:
        given = f"--pretrained-checkpoint {pretrained} and --init-from-hf {source}"
        yield f"{given} exclude each other: leave one of them out"
    if not config.start.load_optim and load is None:
        yield "--no-load-optim has no effect without --load: leave it out"
    if source is not None and preset is not None:
        yield f"--preset {preset} has no effect with --init-from-hf {source}, which sets the shape: leave it out"


@_about("vocab_size", "tokenizer", "mock_data", "data_path", "preset", "init_from_hf")
def _vocabulary(config: Config, world_size: int) -> Iterator[str]:
    if (
        config.model.vocab_size is None
        and config.checkpoint.init_from_hf is None  # its config.json has the size, or is refused
        and config.data.tokenizer is None
        and (config.data.mock_data or config.data.data_path or config.data.train_data_path)
    ):
        source = "--mock-data" if config.data.mock_data else "--data-path"
        yield f"{source} needs a vocabulary: use --tokenizer PATH or --vocab-size N"
