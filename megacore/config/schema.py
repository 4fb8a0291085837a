"""The configuration of a run as its sections, before (`Config`) and after (`ResolvedConfig`) it is resolved.

A `Config` holds what the user set; fields that follow from others may be None. Everything that builds or trains takes a
`ResolvedConfig`. An entry point with further flags has a subclass of both with one more section (bert.py). Nothing here
imports torch: a wrong configuration is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_type_hints

from megacore.config.checkpoint import CheckpointConfig, StartConfig
from megacore.config.data import DataConfig
from megacore.config.dimensions import DIMENSIONS, fill_degrees, ranks_of_role, size_of_role
from megacore.config.experts import ExpertsConfig
from megacore.config.fields import Section, cached, field_infos
from megacore.config.logging import LoggingConfig
from megacore.config.lora import LoraConfig
from megacore.config.messages import nearest_name
from megacore.config.model import ModelConfig, MupConfig, ResolvedModel
from megacore.config.optimizer import OptimizerConfig, ResolvedOptimizer
from megacore.config.optimizers import (
    OPTIMIZERS,
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    AverageConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OneBitAdamConfig,
    OneBitLambConfig,
    OptimizerSettings,
    SGDConfig,
)
from megacore.config.parallel import (
    AUTO_SCHEDULE,
    STAGED_SCHEDULES,
    V_SCHEDULES,
    ParallelConfig,
    ResolvedParallel,
)
from megacore.config.parameter_groups import ParameterGroups
from megacore.config.precision import PrecisionConfig, ResolvedPrecision
from megacore.config.presets import GPT_PRESETS, Shape, preset_problem
from megacore.config.rampup import BatchSizes, RampupConfig
from megacore.config.rules import Rule
from megacore.config.spelling import flag_and_value
from megacore.config.training import ResolvedTraining, TrainingConfig
from megacore.config.watch import SpikeConfig, WatchConfig
from megacore.remote import is_url


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run of pretrain_gpt.py, and the base class of other entry points' configurations."""

    model: ModelConfig = field(default_factory=ModelConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    sgd: SGDConfig = field(default_factory=SGDConfig)
    lion: LionConfig = field(default_factory=LionConfig)
    lamb: LambConfig = field(default_factory=LambConfig)
    onebitadam: OneBitAdamConfig = field(default_factory=OneBitAdamConfig)
    onebitlamb: OneBitLambConfig = field(default_factory=OneBitLambConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    mup: MupConfig = field(default_factory=MupConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    training: TrainingConfig
    rampup: RampupConfig = field(default_factory=RampupConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    start: StartConfig = field(default_factory=StartConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    presets: ClassVar[Mapping[str, Shape]] = GPT_PRESETS
    rules: ClassVar[Sequence[Rule]] = ()
    """What must hold between sections for this entry point only."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Fields that only other entry points accept, each with the reason and the way out, which follow the flag in the
    message."""
    help_texts: ClassVar[Mapping[str, str]] = {}
    """Help texts that replace those of the sections, where a field has another meaning for this entry point."""
    examples: ClassVar[Mapping[str, str]] = {
        "a tiny model on generated tokens, in one process": (
            "python pretrain_gpt.py --preset gpt2-tiny --mock-data --train-iters 20"
        ),
        "GPT-2 124M on 8 processes: 2 x 2 x 2": (
            "torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2 --dp 2 \\\n"
            "    --preset gpt2-small --tokenizer data/tokenizer \\\n"
            "    --data-path data/corpus_text_document --global-batch-size 64 \\\n"
            "    --train-iters 1000 --save-interval 100 --output-dir runs/a"
        ),
        "the same run again, from its newest checkpoint": (
            "torchrun --nproc-per-node 8 pretrain_gpt.py \\\n    --config runs/a/config.toml --load auto"
        ),
    }
    """Commands for the help, each with its purpose. A line is at most 76 characters."""

    def with_sequences_of_device(self, *, on_cpu: bool) -> Self:
        """With the default of --sequence-parallel on a CPU or an accelerator. The values of `DECIDE_SEQUENCES` must be
        valid."""
        parallel = self.parallel
        # Without tensor parallelism it stays undecided: another layout of the same file decides it anew.
        if parallel.sequence_parallel is not None or parallel.tp == 1:
            return self
        splits = not on_cpu and self.data.seq_length % parallel.sequence_unit(sequence_parallel=True) == 0
        splits = splits and not self.training.distribute_saved_activations
        return dataclasses.replace(self, parallel=dataclasses.replace(parallel, sequence_parallel=splits))

    def value(self, name: str) -> Any:
        return getattr(getattr(self, section_of(type(self), name)), name)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """The configuration with other values of fields, by name; all else stays as it is, also what was derived."""
        sections = {}
        for name, kind in sections_of(type(self)).items():
            if changed := {field: value for field, value in values.items() if field in field_infos(kind)}:
                sections[name] = dataclasses.replace(getattr(self, name), **changed)
        return dataclasses.replace(self, **sections)

    def misspelled(self, unread: frozenset[str]) -> dict[str, tuple[str, str]]:
        """Of fields whose value is no name that they may have: the one that was probably meant, and the message."""
        sections: list[Section] = [getattr(self, name) for name in sections_of(type(self))]
        return {
            name: (near, said)
            for section in sections
            for name, said in section.wrong_fields().items()
            if name not in unread and (near := nearest_name(str(getattr(section, name)), section.infos[name].choices))
        }

    @property
    def checkpoint_dir(self) -> str:
        """Where the checkpoints of the run go: the URL of --save, or else the output directory."""
        return self.checkpoint.save or self.training.output_dir

    def saving_to(self, directory: str) -> Self:
        """The configuration with another `checkpoint_dir`, a path or a URL."""
        if is_url(directory):
            return dataclasses.replace(self, checkpoint=dataclasses.replace(self.checkpoint, save=directory))
        training = dataclasses.replace(self.training, output_dir=directory)
        return dataclasses.replace(self, training=training, checkpoint=dataclasses.replace(self.checkpoint, save=None))

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        """The section of the optimizer that is chosen."""
        settings: OptimizerSettings = getattr(self, self.optimizer.optimizer)
        return settings

    @property
    def width_ratio(self) -> float:
        """How many times as wide as the base of muP the model is; 1 without muP."""
        return self.mup.ratio(self.model.hidden_size)

    @property
    def parameter_groups(self) -> ParameterGroups:
        """The scale of every parameter's learning rate and weight decay."""
        return self.optimizer.parameter_groups(
            self.model.num_layers, width_ratio=self.width_ratio, settings=self.optimizer_settings
        )

    @property
    def kept_per_parameter(self) -> float:
        """Bytes that are kept per parameter beside the weights: of the optimizer's state, and of an average."""
        return self.optimizer_settings.bytes_per_parameter + self.average.bytes_per_parameter

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values by field that replace the defaults of the sections. They may depend on the given values."""
        values = {"virtual_stages": 2} if given.get("schedule") in V_SCHEDULES else {}
        return values | ({"lr_warmup_iters": (given.get("train_iters") or 0) // 50} if given.get("recipe") else {})

    @classmethod
    def all_defaults(cls) -> dict[str, dict[str, Any]]:
        """What `defaults` returns for each flag and value that it depends on; the first entry holds without them."""
        return {"": cls.defaults({})}

    @property
    def lr_decay_iters(self) -> int:
        """The step at which the learning rate's decay ends; with a batch-size ramp in steps of --global-batch-size."""
        return self.optimizer.lr_decay_iters or self._full_steps

    @property
    def _full_steps(self) -> int:
        """--train-iters, in steps of --global-batch-size."""
        training, full, ramp = self.training, self.training.global_batch_size, self.rampup.ramp()
        if ramp is None or full is None:
            return training.train_iters
        return max(1, int(BatchSizes(full, ramp).full_steps(training.train_iters)))

    @property
    def eval_iters(self) -> int:
        """Global batches per evaluation; 0: there is none."""
        training = self.training
        if training.eval_iters is not None:
            return training.eval_iters
        steps = min(training.eval_interval or training.train_iters, training.train_iters)
        # Forward is a third of a step, so that a tenth of the steps adds about 3% to a run.
        return min(max(steps // 10, 1), 100)

    def resolve(self, world_size: int, *, vocab_size: int | None = None) -> ResolvedConfig:
        """Fills in the fields that follow from others. Raises ValueError where neither `vocab_size` nor the
        configuration has the size of the vocabulary."""
        return with_registered(ResolvedConfig)(**self.resolved_sections(world_size, vocab_size))

    @property
    def has_whole_backwards(self) -> bool:
        """Whether --schedule zero-bubble does not split backward: with whole backwards it is 1F1B."""
        # A block that is computed again would be so in the first half of backward, and in the second once for each of
        # its operators with weights (pipeline/backward.py).
        return self.parallel.schedule == "zero-bubble" and self.training.recompute == "full"

    def resolved_sections(self, world_size: int, vocab_size: int | None) -> dict[str, Any]:
        """The sections of the resolved configuration by name: the arguments of its constructor."""
        parallel, training = self.parallel, self.training
        if self.has_whole_backwards:
            parallel = dataclasses.replace(parallel, schedule="1f1b")
        # Without experts --etp changes nothing: a note says so, and scripts may give it to every run.
        if self.experts.num_experts is None:
            parallel = dataclasses.replace(parallel, etp=None)
        degrees = fill_degrees(parallel, world_size)  # the replicas too, which the batch size needs below
        filled = {d.degree: degrees[d.name] for d in DIMENSIONS if isinstance(d.degree, str)}
        replicas = size_of_role("batch", degrees)
        global_batch_size = training.global_batch_size or training.micro_batch_size * replicas
        microbatches = global_batch_size // training.micro_batch_size
        sections = {name: getattr(self, name) for name in sections_of(type(self))}
        return sections | {
            "model": dataclasses.replace(
                self.model.resolve(
                    seq_length=self.data.seq_length,
                    vocab_size=vocab_size,
                    experts=self.experts.resolve(self.model.inner_size),
                ),
                **self.mup.multipliers(self.model),
            ),
            "parallel": parallel.resolved_as(ResolvedParallel, **filled),
            "precision": self.precision.resolve(microbatches),
            "optimizer": self.optimizer.resolved_as(
                ResolvedOptimizer, min_lr=self.optimizer.end_lr, lr_decay_iters=self.lr_decay_iters
            ),
            "training": training.resolved_as(
                ResolvedTraining,
                global_batch_size=global_batch_size,
                eval_interval=training.eval_interval if self.eval_iters else 0,
                eval_iters=self.eval_iters,
            ),
        }

    def wrong_fields(self, wrong: frozenset[str]) -> dict[str, str]:
        """The fields outside `wrong` whose value this entry point refuses whatever the others are, each with its
        message."""
        messages = {}
        if self.model.preset is not None and self.model.preset not in self.presets and "preset" not in wrong:
            messages["preset"] = preset_problem(self.model.preset, self.presets)
        for name, why in self.unsupported.items():
            if name not in wrong and name in getattr(self, section_of(type(self), name)).set_fields:
                messages[name] = f"{flag_and_value(name, self.value(name))} {why}"
        return messages


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """The configuration of a run whose number of processes and vocabulary are known."""

    is_causal: ClassVar[bool] = True  # whether a position attends to itself and earlier ones only
    # Whether the document number of padding is 0, and results are set to 0 there. Otherwise padding is one more
    # document.
    padded_documents: ClassVar[bool] = False

    model: ResolvedModel = field()
    parallel: ResolvedParallel = field()
    precision: ResolvedPrecision = field()
    optimizer: ResolvedOptimizer = field()
    training: ResolvedTraining = field()

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size of every step."""
        return BatchSizes(self.training.global_batch_size, self.rampup.ramp())

    @property
    def replica_batch_size(self) -> int:
        """Samples of one microbatch on all replicas together."""
        return self.training.micro_batch_size * ranks_of_role("batch", self.parallel)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each replica, once the batch has its full size."""
        return self.training.global_batch_size // self.replica_batch_size

    @property
    def rank_positions(self) -> int:
        """Positions of each sequence that a rank computes."""
        return self.data.seq_length // ranks_of_role("sequence", self.parallel)

    @property
    def offloads(self) -> bool:
        """Whether something lies in host memory while ranks compute on accelerators."""
        return bool(self.offload_flags)

    @property
    def offload_flags(self) -> list[str]:
        """The flags that put something in host memory."""
        parallel = self.parallel
        given = {
            "--offload-optimizer": parallel.offload_optimizer,
            "--offload-params": parallel.offload_params,
            "--offload-activations": self.training.offload_activations,
        }
        return [flag for flag, on in given.items() if on]

    @property
    def context_comm(self) -> Literal["allgather", "ring", "ulysses"]:
        """How the ranks that divide sequences exchange keys and values, once that is chosen."""
        tp, cp = self.parallel.tp, self.parallel.cp
        if self.parallel.cp_comm != "auto":
            return self.parallel.cp_comm
        if self.training.reproducible:
            return "ulysses"
        if not self.is_causal:
            return "allgather"
        heads, groups = self.model.num_attention_heads // tp, max(self.model.query_groups // tp, 1)
        # Of n query and g key heads on a tp rank, N ranks send less as `ulysses` if N > n/g + 1 and N divides g. It
        # waits for what it sends; a ring computes meanwhile, and is left only for a fast link.
        sends_less = groups % cp == 0 and heads % cp == 0 and cp > heads / groups + 1
        return "ulysses" if sends_less and tp * cp <= RANKS_OF_FAST_LINK else "ring"

    @property
    def beside_hidden_states(self) -> tuple[str, ...]:
        """What travels with the hidden states from layer to layer, [b, s] int64 each: `documents`, the number of each
        position's document, `positions` within it, and `padding`, 1 for positions that experts must leave out."""
        pads = self.model.experts is not None and self.data.packing != "concat"
        return (*self.data.beside_tokens, *(("padding",) if pads else ()))

    def with_degrees(self, values: Mapping[str, Any]) -> Self:
        """The run with other degrees, without what has no meaning for them. `values`: of `ResolvedParallel`, by
        field."""
        before, after = self.parallel, dataclasses.replace(self.parallel, **values)
        changes: dict[str, Any] = dict(values)
        changes["etp"] = None if before.etp in (None, before.tp) else min(before.etp, after.tp)
        if after.pp == 1:
            changes["virtual_stages"] = 1
            changes |= {"schedule": AUTO_SCHEDULE} if after.schedule in STAGED_SCHEDULES else {}
        if after.pp * changes.get("virtual_stages", before.virtual_stages) != before.pp * before.virtual_stages:
            changes |= {"pipeline_layout": None, "schedule_csv": None}
        if after.cp == 1:
            changes["cp_comm"] = "auto"
        if after.tp == 1:
            changes["distribute_saved_activations"] = False
            changes |= {"sequence_parallel": False} if after.sequence_parallel else {}
        if after.tp == 1 or after.sequence_parallel is False:
            changes["async_tp"] = False
        if after.zero_shard_size is not None and ranks_of_role("replicas", after) % after.zero_shard_size:
            changes["zero_shard_size"] = None
        return self.with_values(changes)

    def for_device(self, *, on_cpu: bool, bf16: bool | None = None) -> Self:
        """With the defaults that depend on where the ranks compute. `bf16`: whether matrix products in bf16 are fast
        there; None: not known, and --precision auto stays undecided."""
        config = self.with_sequences_of_device(on_cpu=on_cpu)
        precision = config.precision if bf16 is None else config.precision.for_device(bf16=bf16)
        return config if precision is config.precision else dataclasses.replace(config, precision=precision)


@cached  # evaluating annotations takes milliseconds
def sections_of(kind: type[Config]) -> dict[str, type[Section]]:
    """The section classes of a kind of configuration by name, in order."""
    hints = get_type_hints(kind)
    return {section.name: hints[section.name] for section in dataclasses.fields(kind)}


def section_of(kind: type[Config], field_name: str) -> str:
    """The section of a field of a kind of configuration, both by name."""
    return next(name for name, section in sections_of(kind).items() if field_name in field_infos(section))


C = TypeVar("C", bound=Config)


def with_registered(kind: type[C]) -> type[C]:
    """A kind of configuration with a section for each optimizer that was registered (`register_optimizer`): a subclass;
    the kind itself, where there is none."""
    added = {name: settings for name, settings in OPTIMIZERS.items() if name not in sections_of(kind)}
    return _with_sections(kind, tuple(added.items())) if added else kind


def _with_sections(kind: type[C], sections: tuple[tuple[str, type[Section]], ...]) -> type[C]:
    if (kind, sections) not in _EXTENDED:  # one class, so that two configurations may be equal
        fields = [(name, section, field(default_factory=section)) for name, section in sections]
        namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        _EXTENDED[kind, sections] = dataclasses.make_dataclass(
            kind.__name__, fields, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
        )
    return cast(type[C], _EXTENDED[kind, sections])


_EXTENDED: dict[tuple[type[Config], tuple[tuple[str, type[Section]], ...]], type[Config]] = {}


SECTIONS = sections_of(Config)
"""The sections that every entry point has."""

RANKS_OF_FAST_LINK = 8
"""Ranks that are taken to share a node, whose links are fast; neighbours, as --tp and --cp ranks are."""
DECIDE_SEQUENCES = frozenset({"tp", "cp", "seq_length", "sequence_parallel", "distribute_saved_activations"})
"""Fields that the default of --sequence-parallel depends on."""
UNKNOWN_VOCAB_SIZE = 0
"""The size of a vocabulary that could not be read. Only the checks of input files ever see it, in a run that is about
to be refused (`parse_config`)."""
