"""What must hold between the ranks of a run, and between what they divide: the model, a sequence, layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megacore.config.dimensions import degree_fields, fill_degrees, named_degrees, size_of_role
from megacore.config.fields import field_infos
from megacore.config.messages import counted, divisors, number
from megacore.config.parallel import ParallelConfig
from megacore.config.pipeline_layout import parse_layout
from megacore.config.problem import WORLD_SIZE, Change, Problem, Values, divisors_of, multiples_of, up_to
from megacore.config.rules import FURTHER, Rules
from megacore.config.schema import Config

LAYOUT_RULES = Rules()


@LAYOUT_RULES.about(*degree_fields())
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


@LAYOUT_RULES.about(*degree_fields(), "zero_shard_size", "num_experts")
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


@LAYOUT_RULES.about("tp", "num_attention_heads")
def _heads(config: Config, world_size: int) -> Iterator[str]:
    tp, heads = config.parallel.tp, config.model.num_attention_heads
    if heads % tp:
        said = f"--tp {tp} must divide --num-attention-heads {heads}"
        yield Problem(said, divisors_of("tp", tp, heads, bare=True))


@LAYOUT_RULES.about("tp", "num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")
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


@LAYOUT_RULES.about("tp", "hidden_size", "ffn_hidden_size")
def _ffn(config: Config, world_size: int) -> Iterator[str]:
    tp, ffn = config.parallel.tp, config.model.inner_size
    if ffn % tp:
        derived = "" if config.model.ffn_hidden_size else " (4 x --hidden-size)"
        yield Problem(
            f"--tp {tp} must divide --ffn-hidden-size {ffn}{derived}",
            divisors_of("tp", tp, ffn),
            multiples_of("ffn_hidden_size", ffn, tp),
        )


@LAYOUT_RULES.about("tp", "cp", "seq_length", "sequence_parallel")
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


@LAYOUT_RULES.about("cp", "attention_dropout", "reproducible")
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


@LAYOUT_RULES.about("cp", "cp_comm", "tp", "num_attention_heads", "num_query_groups")
def _heads_of_context(config: Config, world_size: int) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    if parallel.cp_comm == "ulysses":
        yield from undivided_heads(model.num_attention_heads, model.query_groups, tp=parallel.tp, cp=parallel.cp)


def undivided_heads(heads: int, groups: int, *, tp: int, cp: int) -> Iterator[Problem]:
    """Why --cp-comm ulysses cannot exchange the heads of a tp rank; layers that are built from Python ask too."""
    held = max(groups // tp, 1)
    if cp > 1 and heads % tp == 0 and (heads // tp % cp or (held % cp and cp % held)):
        yield Problem(
            f"--cp-comm ulysses divides the {counted(heads // tp, 'query head')} and {counted(held, 'key head')} of a "
            f"tp rank over --cp {cp}, which must divide the former, and divide the latter or be a multiple of it",
            Change("--cp-comm ring", {"cp_comm": "ring"}),
            Change("--cp-comm allgather", {"cp_comm": "allgather"}),
            divisors_of("cp", cp, heads // tp),
        )


@LAYOUT_RULES.about("cp", "attention", "reproducible")
def _attention_of_context(config: Config, world_size: int) -> Iterator[str]:
    fused = config.training.attention == "fused-softmax"
    if config.parallel.cp > 1 and fused and not config.training.reproducible:  # which computes whole sequences
        yield Problem(
            f"--attention fused-softmax is not possible with --cp {config.parallel.cp}, because it needs all keys of "
            "a row at once",
            Change("--attention sdpa", {"attention": "sdpa"}),
            Values(name="cp", among=[1], near=config.parallel.cp),
        )


@LAYOUT_RULES.about("pp", "num_layers", "virtual_stages", "pipeline_layout")
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
            Values(name="num_layers", among=range(pp, pp + FURTHER), near=layers, bound="or more"),
        )
    elif pp * virtual > layers:
        yield Problem(
            f"--pp {pp} x --virtual-stages {virtual} = {pp * virtual} must be at most --num-layers {layers}",
            Values(name="virtual_stages", among=range(layers // pp, 0, -1), near=virtual, bound="or less"),
            Values(name="pp", among=range(layers // virtual, 0, -1), near=pp, bound="or less"),
            Values(name="num_layers", among=range(pp * virtual, pp * virtual + FURTHER), near=layers, bound="or more"),
        )


@LAYOUT_RULES.about("recompute_num_layers", "num_layers")
def _recomputed(config: Config, world_size: int) -> Iterator[str]:
    recomputed, layers = config.training.recompute_num_layers, config.model.num_layers
    if recomputed is None or recomputed <= layers:
        return
    most = {"recompute": "full", "recompute_num_layers": layers}  # of which the first may be another problem
    yield Problem(
        f"--recompute-num-layers {recomputed} must be at most --num-layers {layers}",
        up_to("recompute_num_layers", recomputed, layers)
        if config.training.recompute == "full"
        else Change(f"--recompute full --recompute-num-layers {layers}", most),
        Change("leave it out", {"recompute_num_layers": None}),
    )


@LAYOUT_RULES.about("distribute_saved_activations", "tp", "sequence_parallel", "hidden_size")
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


@LAYOUT_RULES.about("optimizer", "tp")
def _whole_matrices(config: Config, world_size: int) -> Iterator[str]:
    settings = config.optimizer_settings
    if config.parallel.tp > 1 and settings.takes_some_whole and not settings.joins_slices:
        yield Problem(
            f"--optimizer {config.optimizer.optimizer} needs whole matrices, which --tp {config.parallel.tp} splits",
            Values(name="tp", among=[1], near=config.parallel.tp),
            Change("use another --optimizer"),
        )
