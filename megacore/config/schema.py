"""The configuration of a run: its sections, what must hold between them, and what follows from them.

`validate` names every violated constraint at once, with the nearest values that would do; `resolve` then fills the
fields that follow from others. What the disk has to say is in missing_files.py, the way from the command line and from
a TOML file to a `Config` in cli.py. An entry point with settings of its own has a subclass of `Config` with a section
more (bert_section.py). Nothing here imports torch: a wrong configuration is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, get_type_hints

from megacore.config.checkpoint_section import CheckpointConfig
from megacore.config.fields import Section, as_given, field_infos
from megacore.config.messages import counted, divisors, nearest_multiples, one_of
from megacore.config.model import ModelConfig
from megacore.config.pipeline_layout import parse_layout
from megacore.config.presets import GPT_PRESETS, Shape, preset_problem
from megacore.config.sections import DataConfig, LoggingConfig, ParallelConfig, TrainingConfig
from megacore.config.update_sections import OptimizerConfig, PrecisionConfig

T = TypeVar("T")


__all__ = [
    "SECTIONS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainingConfig",
    "resolve",
    "sections_of",
    "validate",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run; pretrain_gpt.py's, and the base of every other entry point's."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    presets: ClassVar[Mapping[str, Shape]] = GPT_PRESETS
    foreign: ClassVar[Mapping[str, str]] = {}
    """Fields that are other entry points' alone: after the flag as it was given, why, and the way out."""
    meanings: ClassVar[Mapping[str, str]] = {}
    """What fields mean to this entry point, where that is not what their own help texts say."""

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values by field that take the place of the sections' defaults, which may depend on what is given."""
        return {}

    @classmethod
    def all_defaults(cls) -> dict[str, dict[str, Any]]:
        """What `defaults` gives, by the flag with its value that it depends on; first what holds without it."""
        return {"": cls.defaults({})}

    def wrong_fields(self, wrong: frozenset[str]) -> dict[str, str]:
        """The fields whose value this kind of configuration refuses whatever the others are, each with the message
        that says so, leaving aside those that are `wrong` on their own."""
        found = {}
        if self.model.preset is not None and self.model.preset not in self.presets and "preset" not in wrong:
            found["preset"] = preset_problem(self.model.preset, self.presets)
        for section in sections_of(type(self)):
            for name, info in field_infos(type(getattr(self, section))).items():
                value = getattr(getattr(self, section), name)
                if name in self.foreign and name not in wrong and value != info.default:
                    found[name] = f"{as_given(name, value)} {self.foreign[name]}"
        return found

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        """Yields what is wrong between the sections of this kind of configuration alone, leaving aside the fields that
        are `wrong` on their own."""
        yield from ()


C = TypeVar("C", bound=Config)


def sections_of(kind: type[Config]) -> dict[str, type[Section]]:
    """The sections of a kind of configuration by name, in order."""
    if kind not in _SECTIONS_OF:  # evaluating annotations takes a while
        hints = get_type_hints(kind)
        _SECTIONS_OF[kind] = {section.name: hints[section.name] for section in dataclasses.fields(kind)}
    return _SECTIONS_OF[kind]


_SECTIONS_OF: dict[type[Config], dict[str, type[Section]]] = {}


SECTIONS = sections_of(Config)
"""The sections that every entry point has."""


def known(value: T | None) -> T:
    """A field's value once `resolve` has filled it (`known(config.model.vocab_size)`)."""
    assert value is not None, "the configuration is resolved before anything is built"
    return value


def resolve(config: C, world_size: int) -> C:
    """Fills the fields that follow from others, once `validate` has found nothing. The vocabulary's size is not among
    them: only the tokenizer knows it.

    Args:
        config: a valid configuration.
        world_size: the number of processes of the run.
    """
    config = dataclasses.replace(config, **{name: getattr(config, name).filled() for name in sections_of(type(config))})
    model, parallel, training = config.model, config.parallel, config.training
    dp = parallel.dp or world_size // (parallel.tp * parallel.pp)
    replace = dataclasses.replace
    return replace(
        config,
        model=model.with_sizes(config.data.seq_length),
        parallel=replace(parallel, dp=dp),
        optimizer=replace(config.optimizer, lr_decay_iters=_lr_decay_iters(config)),
        training=replace(training, global_batch_size=training.global_batch_size or training.micro_batch_size * dp),
    )


def validate(config: Config, world_size: int, *, unread: frozenset[str] = frozenset()) -> list[str]:
    """Names every violated constraint of a configuration, resolved or not.

    Args:
        config: the configuration to check; it need not be valid in any respect.
        world_size: the number of processes of the run.
        unread: fields whose given value could not be read: what depends on them is not reported.

    Returns:
        A line a problem, which names the flags, their values, the constraint and the way out; none if all is well.
    """
    sections: list[Section] = [getattr(config, name) for name in sections_of(type(config))]
    impossible = [section.wrong_fields() for section in sections]
    wrong = unread.union(*impossible)
    foreign = config.wrong_fields(wrong)
    wrong |= foreign.keys()
    found = list(foreign.values())
    for section, messages in zip(sections, impossible, strict=True):
        found += [message for key, message in messages.items() if key not in unread]
        found += section.constraints(wrong)
    for names, constraint in _CONSTRAINTS:
        if not names & wrong:
            found += constraint(config, world_size)
    return [*found, *config.constraints(wrong)]


# ---- constraints between sections ------------------------------------------------------------------------------------

_Constraint = Callable[[Config, int], Iterator[str]]
_CONSTRAINTS: list[tuple[frozenset[str], _Constraint]] = []


def _about(*names: str) -> Callable[[_Constraint], _Constraint]:
    """Registers a constraint, which is checked only where each of the fields it is about is possible on its own."""

    def register(constraint: _Constraint) -> _Constraint:
        _CONSTRAINTS.append((frozenset(names), constraint))
        return constraint

    return register


@_about("tp", "seq_length", "sequence_parallel")
def _sequence_split(config: Config, world_size: int) -> Iterator[str]:
    tp, length = config.parallel.tp, config.data.seq_length
    if config.parallel.sequence_parallel and length % tp:
        yield (
            f"--sequence-parallel splits --seq-length {length} over --tp {tp}, which must divide it: use --seq-length "
            f"{one_of(nearest_multiples(length, tp))}, --tp {one_of(divisors(length, near=tp, most=6))}, "
            "or leave --sequence-parallel out"
        )


@_about("tp", "num_attention_heads")
def _heads(config: Config, world_size: int) -> Iterator[str]:
    tp, heads = config.parallel.tp, config.model.num_attention_heads
    if heads % tp:
        yield f"--tp {tp} must divide --num-attention-heads {heads}: use {one_of(divisors(heads, near=tp))}"


@_about("tp", "num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")
def _groups(config: Config, world_size: int) -> Iterator[str]:
    tp, groups, model = config.parallel.tp, config.model.query_groups, config.model
    if model.num_query_groups is None or model.num_attention_heads % groups or model.num_attention_heads % tp:
        return  # nothing to say, or said elsewhere
    rows = 2 * model.head_size  # of a group's key and value

    def fits(ranks: int) -> bool:
        return groups % ranks == 0 or (ranks % groups == 0 and rows % (ranks // groups) == 0)

    if not fits(tp):
        good = [ranks for ranks in divisors(model.num_attention_heads, near=tp) if fits(ranks)]
        yield (
            f"--tp {tp} must divide --num-query-groups {groups}, or be a multiple of it that divides each group's key "
            f"and value of {rows} rows: use --tp {one_of(good)}"
        )


@_about("tp", "hidden_size", "ffn_hidden_size")
def _ffn(config: Config, world_size: int) -> Iterator[str]:
    tp, ffn = config.parallel.tp, config.model.inner_size
    if ffn % tp:
        derived = "" if config.model.ffn_hidden_size else " (4 x --hidden-size)"
        yield (
            f"--tp {tp} must divide --ffn-hidden-size {ffn}{derived}: use --tp {one_of(divisors(ffn, near=tp))}, "
            f"or --ffn-hidden-size {one_of(nearest_multiples(ffn, tp))}"
        )


@_about("reproducible", "grad_reduce_dtype")
def _reproducible(config: Config, world_size: int) -> Iterator[str]:
    if config.training.reproducible and config.precision.grad_reduce_dtype != "fp32":
        yield (
            f"--reproducible adds gradients exactly, and --grad-reduce-dtype {config.precision.grad_reduce_dtype} "
            "rounds them first: use --grad-reduce-dtype fp32, or leave --reproducible out"
        )


@_about("recompute_num_layers", "num_layers")
def _recomputed(config: Config, world_size: int) -> Iterator[str]:
    recomputed, layers = config.training.recompute_num_layers, config.model.num_layers
    if recomputed is not None and recomputed > layers:
        yield (
            f"--recompute-num-layers {recomputed} must be at most --num-layers {layers}: use {layers} or less, "
            "or leave it out for all"
        )


@_about("pp", "num_layers", "virtual_stages", "pipeline_layout")
def _stages(config: Config, world_size: int) -> Iterator[str]:
    pp, virtual, layers = config.parallel.pp, config.parallel.virtual_stages, config.model.num_layers
    if config.parallel.pipeline_layout is not None:
        try:
            parse_layout(config.parallel.pipeline_layout, stages=pp * virtual, blocks=layers)
        except ValueError as error:
            yield f"--pipeline-layout {config.parallel.pipeline_layout}: {error}"
    elif pp > layers:
        yield f"--pp {pp} must be at most --num-layers {layers}: use {layers} or less, or --num-layers {pp} or more"
    elif pp * virtual > layers:
        yield (
            f"--pp {pp} x --virtual-stages {virtual} = {pp * virtual} must be at most --num-layers {layers}: "
            f"use --virtual-stages {layers // pp}, or --num-layers {pp * virtual} or more"
        )


@_about("tp", "pp", "dp")
def _processes(config: Config, world_size: int) -> Iterator[str]:
    tp, pp, dp = config.parallel.tp, config.parallel.pp, config.parallel.dp
    running = f"the run has {counted(world_size, 'process', 'processes')}"
    fits = world_size % (tp * pp) == 0
    if dp is not None and tp * pp * dp != world_size:
        way_out = f"use --dp {world_size // (tp * pp)}, or leave --dp out, or " if fits else ""
        yield f"--tp {tp} x --pp {pp} x --dp {dp} = {tp * pp * dp}, but {running}: {way_out}{_start(tp * pp * dp)}" + (
            "" if fits else f", or choose degrees whose product is {world_size}"
        )
    if dp is None and not fits:
        degree = (
            f"use --tp {one_of(divisors(world_size // pp, near=tp))}"
            if world_size % pp == 0
            else f"choose --tp x --pp among {one_of(divisors(world_size))}"
        )
        yield (
            f"--tp {tp} x --pp {pp} = {tp * pp} must divide the number of processes, but {running}: {degree}, or "
            f"{_start(*nearest_multiples(world_size, tp * pp))}"
        )


@_about("tp", "pp", "dp", "micro_batch_size", "global_batch_size")
def _batch(config: Config, world_size: int) -> Iterator[str]:
    parallel, micro, batch = config.parallel, config.training.micro_batch_size, config.training.global_batch_size
    dp = parallel.dp or world_size // (parallel.tp * parallel.pp)  # 0: too few processes, which has its own line
    if batch is not None and dp and batch % (micro * dp):
        derived = "" if parallel.dp else " (derived)"
        yield (
            f"--global-batch-size {batch} must be a multiple of --micro-batch-size {micro} x --dp {dp}{derived} "
            f"= {micro * dp}: use {one_of(nearest_multiples(batch, micro * dp))}"
        )


@_about("seq_length", "max_position_embeddings")
def _positions(config: Config, world_size: int) -> Iterator[str]:
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if positions is not None and length > positions:
        yield (
            f"--seq-length {length} must be at most --max-position-embeddings {positions}: use {positions} or less, "
            f"or --max-position-embeddings {length} or more"
        )


@_about("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "train_iters")
def _schedule(config: Config, world_size: int) -> Iterator[str]:
    optimizer, end = config.optimizer, _lr_decay_iters(config)
    warmup, final = optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    name = "--lr-decay-iters" if optimizer.lr_decay_iters else "--train-iters"
    if warmup >= end:
        yield f"--lr-warmup-iters {warmup} must be below {name} {end}: use {end - 1} or less, or a larger {name}"
    elif optimizer.lr_decay_style == "WSD" and final is not None and warmup + final > end:
        yield (
            f"--lr-warmup-iters {warmup} + --lr-wsd-decay-iters {final} = {warmup + final} must be at most "
            f"{name} {end}: use --lr-wsd-decay-iters {end - warmup} or less"
        )


@_about("preset", "init_from_hf", "load")
def _start_of_weights(config: Config, world_size: int) -> Iterator[str]:
    source, load, preset = config.checkpoint.init_from_hf, config.checkpoint.load, config.model.preset
    if source is not None and load not in (None, "auto"):
        yield f"--init-from-hf {source} and --load {load} exclude each other: leave one of them out"
    if source is not None and preset is not None:
        yield f"--preset {preset} has no effect with --init-from-hf {source}, which has its own shape: leave it out"


@_about("vocab_size", "tokenizer", "mock_data", "data_path", "preset", "init_from_hf")
def _vocabulary(config: Config, world_size: int) -> Iterator[str]:
    if (
        config.model.vocab_size is None
        and config.checkpoint.init_from_hf is None  # whose config.json says it, or is refused
        and config.data.tokenizer is None
        and (config.data.mock_data or config.data.data_path)
    ):
        source = "--mock-data" if config.data.mock_data else "--data-path"
        yield f"{source} needs a vocabulary: give --tokenizer PATH or --vocab-size N"


# ---- derived values --------------------------------------------------------------------------------------------------


def _lr_decay_iters(config: Config) -> int:
    return config.optimizer.lr_decay_iters or config.training.train_iters


def _start(*counts: int) -> str:
    return f"start {one_of(counts)} processes (torchrun --nproc-per-node)"
