"""The sections of every run except the model: parallel, precision, data, training, checkpoint, logging.

One frozen dataclass per section. A field is a flag (`num_workers` is `--num-workers`), the string under it is its help
text, and its annotation holds its range and its aliases. Each section checks its fields in `constraints()`;
validation.py checks what must hold between sections. Upper bounds of sizes are far beyond any use: they refuse a typing
error before it becomes a list or a tensor of that size.

Help texts say first what the flag does. Where a default depends on other flags, the text ends with "Default: ...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from megacore.config.dimensions import degrees_of
from megacore.config.fields import Flag, Range, Section, field_infos, flag_and_value
from megacore.config.messages import number
from megacore.config.numbers import parse_float

MAX_SEED = 2**63 - 1
AUTO = "auto"
"""The value of `--load` that selects the newest checkpoint of the output directory, or a fresh start without one."""
AUTO_SCHEDULE = "auto"
"""The value of `--schedule` before a schedule is chosen."""
OR_AUTO = f"or --load {AUTO}, which starts from the beginning if --output-dir has no checkpoint"
"""The way out for who gives --load on the first start too, as Megatron-LM's scripts do."""

ScheduleName = Literal["auto", "1f1b", "gpipe", "interleaved", "zero-bubble"]

# Backward starts from the loss scale in fp32, where it must be neither 0 nor infinite.
_LOSS_SCALES = Range(1e-37, 1e38)
_FORMER_INITIAL_SCALE = 65536.0
_TRACED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How --tp x --cp x --pp x --dp ranks share the work."""

    former_defaults: ClassVar[Mapping[str, Any]] = {"pipeline_balance": "parameters", "schedule": "1f1b"}

    tp: Annotated[int, Range(1), Flag(("--tensor-model-parallel-size",))] = 1
    """Tensor-parallel degree: number of ranks that share the weights of each layer. They are neighbouring ranks."""
    pp: Annotated[int, Range(1), Flag(("--pipeline-model-parallel-size",))] = 1
    """Pipeline-parallel degree: number of ranks that the layers are divided over. At most --num-layers."""
    dp: Annotated[int | None, Range(1), Flag(("--data-parallel-size",))] = None
    """Data-parallel degree: number of model replicas that share the batch. Default: the number of processes divided by
    --tp x --cp x --pp."""
    cp: Annotated[int, Range(1), Flag(("--context-parallel-size",))] = 1
    """Context-parallel degree: number of ranks that share each sequence, for sequences whose activations do not fit on
    one. Every rank holds the weights, and --seq-length / --cp positions. 2 x --cp must divide --seq-length."""
    cp_comm: Literal["auto", "allgather", "ring", "ulysses"] = "auto"
    """How the --cp ranks exchange keys and values. allgather: each rank gathers those of the whole sequence, a layer at
    a time. ring: they travel from rank to rank while attention is computed, and no rank ever holds more than two
    shares. ulysses: ranks exchange positions for heads, and each attends over whole sequences with 1/N of the heads.
    auto: ulysses where it sends the least and --tp x --cp is at most 8, else ring; for pretrain_bert.py, whose
    attention is not causal, allgather."""
    ep: Annotated[int, Range(1), Flag(("--expert-model-parallel-size",))] = 1
    """Expert-parallel degree: number of ranks of a pipeline stage that divide the experts of --num-experts. They are
    ranks that differ in --dp, --cp and, with --etp 1, --tp; --ep x --etp must divide their number."""
    etp: Annotated[int | None, Range(1), Flag(("--expert-tensor-parallel-size",))] = None
    """Number of tensor-parallel ranks that split each expert: --tp, or 1, which needs --sequence-parallel where --tp is
    above 1. Default: --tp."""
    schedule: ScheduleName = "auto"
    """Pipeline schedule. auto: the fastest by simulation that fits into memory; the launch summary names it. gpipe: all
    forwards, then all backwards. 1f1b: one forward, one backward. interleaved: 1f1b over --virtual-stages smaller
    stages per rank, which divides the bubble by that number. zero-bubble: weight gradients fill the bubble, which
    shrinks to about a third (ZB-H1)."""
    virtual_stages: Annotated[int, Range(1, 10_000)] = 1
    """Number of stages on each pipeline rank. --schedule interleaved needs 2 or more."""
    schedule_csv: Annotated[str | None, Flag(metavar="FILE")] = None
    """Reads the pipeline schedule from a CSV file instead of --schedule. The file has one row per rank and one
    computation per cell (0F0,0F1,0B0,0B1). Default: no file."""
    pipeline_balance: Literal["time", "parameters", "flops", "uniform"] = "time"
    """What the division of layers into stages balances: predicted time, parameters (for memory), floating-point
    operations, or the number of layers (uniform)."""
    pipeline_layout: Annotated[str | None, Flag(metavar="E,3*t|4*t,H")] = None
    """Layers of each stage, written out. Stages are separated by |, layers by commas: E is the embedding, t a
    transformer block, H the head. Default: balanced as --pipeline-balance says."""
    zero_stage: Annotated[int, Range(0, 3)] = 0
    """ZeRO stage, 0 to 3: what the --dp x --cp ranks shard. 0: nothing. 1: optimizer state and master weights.
    2: gradients too. 3: parameters too. The results are the same for every stage."""
    zero_shard_size: Annotated[int | None, Range(2)] = None
    """Number of neighbouring --dp x --cp ranks that shard with --zero-stage 1 and above, such as those of a node. Other
    ranks hold copies of the shards, and gradients are summed over the copies once per step. Default: all of them."""
    sequence_parallel: bool | None = None
    """Sequence parallelism: norms, dropout and residuals are split along the sequence over the --tp ranks. --tp must
    divide --seq-length. Default: on where the ranks compute on accelerators and --tp divides --seq-length, else off."""
    offload_optimizer: bool = False
    """ZeRO-Offload: master weights and optimizer moments stay in host memory and are updated there. The device keeps
    parameters and gradients."""
    bucket_size_mb: Annotated[float, Range(above=0, high=65536)] = 25.0
    """Size in MiB of the buckets in which gradients are reduced and parameters gathered over --dp. A bucket is never
    larger than a quarter of a stage. With more than 16 ranks buckets grow, so that each rank's share keeps 1 MiB, or
    1/16 of this size if that is less."""
    overlap_grad_reduce: bool = True
    """Reduces gradients over --dp during backward."""
    overlap_param_gather: bool = True
    """Gathers updated parameters during the next forward, with --zero-stage 1 or 2."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, or torch's name of another accelerator. auto: cuda if available, else cpu.
    The backend is NCCL on cuda and gloo on cpu."""
    distributed_timeout_minutes: Annotated[float, Range(0.05, 10080)] = 10.0
    """Minutes that a collective waits for a missing rank before the run fails. At most a week."""

    @property
    def expert_split(self) -> int:
        """Ranks that split each expert."""
        return self.tp if self.etp is None else self.etp

    def sequence_unit(self, *, sequence_parallel: bool) -> int:
        """What --seq-length must be a multiple of: each of the --cp ranks holds two equal ranges of positions, and with
        sequence parallelism the --tp ranks divide what it holds."""
        pieces = self.tp if sequence_parallel else 1
        return pieces if self.cp == 1 else self.cp * math.lcm(2, pieces)

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule; 1F1B, which needs the least memory, until one is chosen."""
        return "1f1b" if self.schedule == AUTO_SCHEDULE else self.schedule

    @property
    def may_split_backward(self) -> bool:
        """Whether the schedule may compute the gradients of inputs and of weights separately."""
        return self.schedule == "zero-bubble" or self.schedule_csv is not None

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if self.zero_stage == 0 and "zero_stage" not in wrong:
            yield from self.without_effect(("zero_shard_size",), wrong, "--zero-stage 0", "--zero-stage 1, 2 or 3")
        if self.cp == 1:
            yield from self.without_effect(("cp_comm",), wrong, "--cp 1", "--cp 2 or more")
        if self.schedule_csv is not None:
            file = f"--schedule-csv {self.schedule_csv}"
            yield from self.without_effect(("schedule",), wrong, file, "it without a file")
        if self.pipeline_layout is not None:
            layout = f"--pipeline-layout {self.pipeline_layout}"
            yield from self.without_effect(("pipeline_balance",), wrong, layout, "it without a layout")
        if not wrong & {"pp", "schedule", "virtual_stages", "schedule_csv"}:
            yield from self._virtual_stages()

    def _virtual_stages(self) -> Iterator[str]:
        schedule, virtual, from_file = self.schedule, self.virtual_stages, self.schedule_csv is not None
        if schedule == "interleaved" and virtual == 1 and not from_file:
            yield (
                "--schedule interleaved needs several stages per rank: use --virtual-stages 2 or more, "
                "or --schedule 1f1b"
            )
        if schedule != "interleaved" and virtual > 1 and not from_file:
            yield (
                f"--virtual-stages {virtual} has no effect with --schedule {schedule}: "
                "leave it out, or use --schedule interleaved"
            )
        if self.pp == 1 and virtual > 1:
            yield f"--virtual-stages {virtual} needs a pipeline: use --pp 2 or more, or leave --virtual-stages out"


@dataclass(frozen=True, kw_only=True)
class ResolvedParallel(ParallelConfig):
    """The parallel section of a run whose number of processes is known."""

    dp: int = field()

    @property
    def degrees(self) -> dict[str, int]:
        """The number of ranks along each dimension of the mesh, by name, outermost first."""
        return degrees_of(partial(getattr, self))

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return math.prod(self.degrees.values())


@dataclass(frozen=True, kw_only=True)
class ChosenSchedule(ResolvedParallel):
    """The parallel section of a run with --schedule auto, after the choice. A file keeps auto, because another layout
    may need another schedule."""

    def as_written(self) -> dict[str, Any]:
        return super().as_written() | {"schedule": AUTO_SCHEDULE, "virtual_stages": 1}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Number formats, and the loss scale of fp16."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of parameters and activations. auto: bf16 on accelerators with fast bf16 products, else fp32.
    Master weights and optimizer moments are always fp32. Gradients are accumulated in --grad-reduce-dtype."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are accumulated and reduced. bf16 halves their memory and traffic, and rounds
    each sum over microbatches and ranks to 8 bits."""
    loss_scale: Annotated[float | None, _LOSS_SCALES, Flag()] = None
    """Fixed loss scale for --precision fp16. Default: a dynamic loss scale."""
    initial_loss_scale: Annotated[float | None, _LOSS_SCALES, Flag()] = None
    """First value of the dynamic loss scale of --precision fp16. Default: 65536 times the number of microbatches in a
    global batch, rounded up to a power of two, so that the mean loss of each microbatch is scaled by 65536 or more."""
    min_loss_scale: Annotated[float, _LOSS_SCALES] = 1.0
    """Smallest value of the dynamic loss scale. The run stops at an overflow that would halve it further."""
    loss_scale_window: Annotated[int, Range(1)] = 1000
    """Number of consecutive steps without overflow after which the loss scale doubles."""
    hysteresis: Annotated[int, Range(1)] = 2
    """Number of overflows at which the dynamic loss scale first halves. After that each overflow halves it, until it
    doubles again (--loss-scale-window); then counting restarts."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if "precision" in wrong:
            return
        if self.precision != "fp16":
            scale = ("loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", *self._initial_scale_if_set())
            yield from self.without_effect(scale, wrong, f"--precision {self.precision}", "--precision fp16")
        elif self.loss_scale is not None and "loss_scale" not in wrong:
            dynamic = ("min_loss_scale", "loss_scale_window", "hysteresis", *self._initial_scale_if_set())
            fixed = f"--loss-scale {number(self.loss_scale)}, which is fixed"
            yield from self.without_effect(dynamic, wrong, fixed, "a dynamic loss scale, without --loss-scale")
            return
        if self.initial_loss_scale is not None and self.initial_loss_scale < self.min_loss_scale:
            yield (
                f"--initial-loss-scale {number(self.initial_loss_scale)} must be at least --min-loss-scale "
                f"{number(self.min_loss_scale)}: use --initial-loss-scale {number(self.min_loss_scale)} or more"
            )

    def _initial_scale_if_set(self) -> tuple[str, ...]:
        """The field of the first loss scale, unless it is the former default, which every config.toml of 0.1.0 has."""
        return () if self.initial_loss_scale == _FORMER_INITIAL_SCALE else ("initial_loss_scale",)

    def resolve(self, microbatches: int) -> ResolvedPrecision:
        """This section with the number format, and with the first value of a dynamic loss scale; other loss scales have
        none.

        The loss is the mean over the global batch. The gradients of one microbatch are therefore smaller than those of
        its mean loss by the number of microbatches. The usual 2^16 is meant for the mean of one microbatch.

        Args:
            microbatches: the number of microbatches in a global batch, over all replicas.
        """
        if self.precision == "auto":
            return self.resolved_as(UndecidedPrecision, precision="fp32")
        if self.precision != "fp16" or self.loss_scale is not None or self.initial_loss_scale is not None:
            return self.resolved_as(ResolvedPrecision)
        scale = 65536.0 * (1 << (microbatches - 1).bit_length())
        return self.resolved_as(ResolvedPrecision, initial_loss_scale=max(scale, self.min_loss_scale))


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedPrecision(PrecisionConfig):
    """The precision section of a run whose number format is known. Two are equal if their settings are."""

    precision: Literal["fp32", "bf16", "fp16"] = field()

    @property
    def has_dynamic_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.precision == "fp16" and self.loss_scale is None

    @property
    def first_loss_scale(self) -> float:
        """The loss scale of the first step; 1 where gradients are not scaled."""
        if self.has_dynamic_scale and self.initial_loss_scale is not None:  # `resolve` has filled it in
            return self.initial_loss_scale
        return 1.0 if self.loss_scale is None else self.loss_scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResolvedPrecision) and astuple(self) == astuple(other)

    __hash__ = PrecisionConfig.__hash__

    def for_device(self, *, bf16: bool) -> ResolvedPrecision:
        """This section on a device that computes bf16 fast, or not: an explicit --precision stays as it is."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class UndecidedPrecision(ResolvedPrecision):
    """The section of a run with --precision auto before its device is known. Until then it is fp32."""

    def for_device(self, *, bf16: bool) -> ResolvedPrecision:
        return self.resolved_as(ResolvedPrecision, precision="bf16" if bf16 else "fp32")


class SplitShares(NamedTuple):
    """The shares of training, validation and test, which sum to 1."""

    train: float
    valid: float
    test: float


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The training data, its split, and how it is loaded."""

    data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """Prefix of the preprocessed dataset, which is PREFIX.bin and PREFIX.idx. Several prefixes are blended in
    proportion to their numbers of tokens; WEIGHT PREFIX WEIGHT PREFIX ... sets the weights."""
    train_data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """The training data instead of --data-path, in the same notation. --split does not divide it."""
    valid_data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """The validation data beside --train-data-path. Without it there is no evaluation."""
    split: Annotated[str, Flag(metavar="A,B,C")] = "949,50,1"
    """Shares of the documents for training, validation and test. Any unit; a missing share is 0."""
    sample_order: Literal["megacore", "megatron"] = "megacore"
    """The order of samples. megacore: a longer run continues the order of a shorter one. megatron: that of Megatron-LM,
    sample by sample, which depends on the number of samples of the run."""
    tokenizer: Annotated[
        str | None, Flag(("--tokenizer-model", "--vocab-file", "--tokenizer-name-or-path"), metavar="PATH")
    ] = None
    """Path of the tokenizer. It is a tokenizer.json, a directory that contains one (such as a transformers directory),
    or a SentencePiece .model file. Default: no tokenizer; --vocab-size must be given."""
    merge_file: Annotated[str | None, Flag(metavar="FILE")] = None
    """GPT-2's merges.txt, where --tokenizer is GPT-2's vocab.json. (BERT's vocab.txt needs no other file.) Default: the
    file beside vocab.json whose name has merges.txt instead."""
    seq_length: Annotated[int, Range(1, 100_000_000)] = 1024
    """Number of tokens in a sample."""
    mock_data: bool = False
    """Trains on generated tokens instead of a dataset. Needs --vocab-size or --tokenizer."""
    num_workers: Annotated[int, Range(0, 64)] = 0
    """Number of processes per rank that prepare batches in advance. 0: the training process prepares them itself."""
    data_cache_path: Annotated[str | None, Flag(metavar="DIR")] = None
    """Directory for the cached sample indices. Default: a directory named cache beside each dataset."""
    packing: Literal["none", "concat", "best-fit"] = "concat"
    """How documents become samples. concat: one stream of documents is cut into samples. none: each sample is one
    document, padded, or cut if it is longer. best-fit: samples hold whole documents, chosen so that little padding is
    left (best-fit decreasing); a document longer than --seq-length is split."""
    reset_position_ids: bool | None = None
    """Restarts positions at each document of a sample. Default: on with --packing best-fit, off with concat."""
    reset_attention_mask: bool | None = None
    """Restricts attention to the document of each token. Default: on with --packing best-fit, off with concat."""
    eod_mask_loss: bool = False
    """Excludes the loss at end-of-document tokens of the input, and at the last token of each document. Needs
    --tokenizer."""

    @property
    def beside_tokens(self) -> tuple[str, ...]:
        """What the layers get beside the tokens: the documents, where attention stays within each, and the positions,
        where they restart. A sample of --packing none is one document, and causal attention sees no padding after
        it."""
        packed = self.packing == "best-fit"
        resets = {"documents": self.reset_attention_mask, "positions": self.reset_position_ids}
        if self.packing == "none":
            return ()
        return tuple(name for name, flag in resets.items() if (packed if flag is None else flag))

    @property
    def is_split(self) -> bool:
        """Whether training and validation data are separate datasets, which --split does not divide."""
        return bool(self.train_data_path)

    def prefixes(self) -> tuple[str, ...]:
        """Every dataset of the run, each once.

        Raises:
            ValueError: as by `blend`.
        """
        return tuple(dict.fromkeys(prefix for stream in (0, 1) for prefix in self.blend(stream)[0]))

    def blend(self, stream: int = 0) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
        """The prefixes of a stream's datasets, and their weights or None.

        Args:
            stream: 0 for training, 1 for validation.

        Raises:
            ValueError: weights and prefixes do not alternate, or a weight is not a positive number.
        """
        name = ("train_data_path", "valid_data_path")[stream] if self.is_split else "data_path"
        path, flag = getattr(self, name), "--" + name.replace("_", "-")
        if len(path) < 2 or _as_number(path[0]) is None:
            return path, None
        weights = [_as_number(w) for w in path[::2]]
        if len(path) % 2 or None in weights:
            raise ValueError(
                f"{flag} {' '.join(path)} mixes weights and prefixes: "
                "use WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes only"
            )
        positive = tuple(w for w in weights if w is not None and math.isfinite(w) and w > 0)
        if len(positive) < len(weights):
            raise ValueError(
                f"{flag} {' '.join(path)} has a weight that is not above 0: "
                "leave that dataset out, or give it a positive weight"
            )
        return path[1::2], positive

    def split_shares(self) -> SplitShares:
        """The shares of --split.

        Raises:
            ValueError: --split is not one to three non-negative numbers, or its first number is 0.
        """
        numbers = [_as_number(part) for part in self.split.strip("'\"").split(",")]  # as a script may quote it
        shares = [s for s in numbers if s is not None and math.isfinite(s) and s >= 0]
        if len(shares) != len(numbers) or len(shares) > 3:
            raise ValueError(
                f"--split {self.split} must be one to three numbers of 0 or more, separated by commas: "
                "use, for example, 949,50,1"
            )
        if shares[0] <= 0:
            raise ValueError(
                f"--split {self.split} leaves nothing to train on: make the first number positive, for example 949,50,1"
            )
        return SplitShares(*(s / sum(shares) for s in [*shares, 0.0, 0.0][:3]))

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        paths = {"data_path", "train_data_path", "valid_data_path"}
        for names, parse in ((paths, self.prefixes), ({"split"}, self.split_shares)):
            try:
                if not names & wrong:
                    parse()
            except ValueError as error:
                yield str(error)
        if not wrong & paths:
            yield from self._paths()
        if self.mock_data and self.data_path:
            yield f"--mock-data and --data-path {' '.join(self.data_path)} exclude each other: leave one of them out"
        has_data = self.mock_data or self.data_path or self.train_data_path
        if not has_data and not wrong & {"data_path", "train_data_path", "mock_data"}:
            yield "--data-path is missing: use the PREFIX that tools/preprocess_data.py wrote, or --mock-data"
        if self.packing == "none" and "packing" not in wrong:
            resets = ("reset_position_ids", "reset_attention_mask")
            yield from self.without_effect(resets, wrong, "--packing none, whose samples are one document", "another")
            if self.mock_data and "mock_data" not in wrong:
                yield "--packing none has no effect with --mock-data, which has no padding: leave it out"
        if self.eod_mask_loss and self.tokenizer is None and not wrong & {"eod_mask_loss", "tokenizer"}:
            yield "--eod-mask-loss needs the end-of-document token: use --tokenizer PATH, or leave --eod-mask-loss out"
        if self.merge_file is not None and self.tokenizer is None and not wrong & {"merge_file", "tokenizer"}:
            yield "--merge-file has no effect without the vocab.json that it belongs to: use --tokenizer vocab.json"
        if self.sample_order == "megatron" and self.packing != "concat" and not wrong & {"sample_order", "packing"}:
            yield (
                f"--sample-order megatron is that of --packing concat, not of --packing {self.packing}: leave one of "
                "them out"
            )

    def _paths(self) -> Iterator[str]:
        """What is wrong with separate training and validation data."""
        if self.train_data_path and (self.data_path or self.mock_data):
            other = "--data-path" if self.data_path else "--mock-data"
            yield f"--train-data-path and {other} exclude each other: leave one of them out"
        if self.valid_data_path and not self.train_data_path:
            yield "--valid-data-path needs --train-data-path: use both, or --data-path with --split"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Batch sizes, number of steps, evaluation, recomputation, loss, and the output directory."""

    micro_batch_size: Annotated[int, Range(1, 1_000_000)] = 1
    """Number of samples in a microbatch: one forward pass of one replica."""
    global_batch_size: Annotated[int | None, Range(1, 1_000_000)] = None
    """Number of samples per step over all replicas. A multiple of --micro-batch-size x --dp. Default:
    --micro-batch-size x --dp, one microbatch per replica."""
    train_iters: Annotated[int, Range(1)]
    """Number of training steps, counted from the start of the run, before any resume."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 1234
    """Seed of the initial weights, dropout and data order. Two runs with the same seed and layout are bitwise equal on
    CPUs; on cuda only with --reproducible."""
    reproducible: bool = False
    """Makes losses and weights bitwise equal for every --tp, --cp, --pp, --dp, --ep, --zero-stage and schedule, with
    the same --micro-batch-size. Slower; a gradient takes 8 bytes while it is summed (docs/explain/numerics.md)."""
    reproducible_blocks: Annotated[int | None, Range(1)] = None
    """Number of blocks in which --reproducible computes every sum that --tp or --cp would cut: a power of two that --tp
    divides. Runs with the same number are bitwise equal. 1: sums are not divided, and another --tp rounds
    differently. Default: the largest of 8, 4, 2 and 1 into which the model can be divided."""
    eval_interval: Annotated[int, Range(0)] = 1000
    """Number of steps between evaluations on the validation split. 0: no evaluation."""
    eval_iters: Annotated[int | None, Range(0)] = None
    """Number of global batches per evaluation. 0: no evaluation, as with --eval-interval 0. Default: a tenth of the
    steps between two evaluations, from 1 to 100."""
    skip_train: bool = False
    """Evaluates once instead of training, and saves no checkpoint: the model of --load, --init-from-hf or
    --pretrained-checkpoint on the validation split."""
    output_dir: Annotated[str, Flag(("--save",), metavar="DIR")] = "output"
    """Output directory for checkpoints, metrics.jsonl and the resolved config.toml. Created if it does not exist."""
    max_bad_steps: Annotated[int, Range(1)] = 10
    """Stops the run after this many consecutive bad steps. A step is bad if its loss or gradient is not finite; it
    leaves the weights unchanged. With a dynamic loss scale only the loss counts."""
    recompute: Literal["none", "selective", "light", "full"] = "none"
    """Activation recomputation: what backward computes again instead of keeping it in memory. selective: attention
    between its projections. light: the outputs of norms and of the MLP's activation, but no matrix product; it has no
    effect with --compile. full: whole transformer blocks; only their inputs are kept. The results are bitwise the
    same."""
    recompute_num_layers: Annotated[int | None, Range(1), Flag()] = None
    """Number of transformer blocks per pipeline stage that --recompute full applies to, from the first. Default: all
    of them."""
    offload_activations: bool = False
    """Copies what transformer blocks keep for backward to host memory, while the next block computes, and back in
    backward. The device holds the activations of two blocks. On a CPU it does nothing, as they are in host memory. The
    results are bitwise the same."""
    distribute_saved_activations: bool = False
    """Divides the inputs that --recompute full keeps over the --tp ranks, which gather them in backward. The results
    are bitwise the same. --sequence-parallel divides them anyway."""
    attention: Literal["auto", "sdpa", "fused-softmax"] = "auto"
    """Implementation of attention. sdpa: torch's fused operator; above 1024 positions windows, documents, ALiBi and
    (on a CPU) dropout run in blocks (docs/explain/kernels.md). fused-softmax: separate score, softmax and value
    products, which keep the attention weights in memory. auto: sdpa."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of norms, activations, softmax and cross-entropy. auto: triton on cuda if it is installed, else
    torch."""
    compile: bool = False
    """Compiles transformer blocks and the loss with torch.compile, which fuses their operators into fewer kernels. The
    first step takes a minute or more. With --loss-chunks 2 or more the loss is not compiled."""
    compile_backend: Literal["inductor", "aot-eager"] = "inductor"
    """Backend of --compile. inductor: generates kernels; on the CPU it needs a C++ compiler. aot-eager: runs PyTorch's
    operators, for finding out whether capture or generated code changes a result."""
    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    """Label smoothing: share of the target probability that is spread evenly over the vocabulary. 0: off. Evaluations
    do not use it."""
    z_loss: Annotated[float, Range(0)] = 0.0
    """Weight of the z-loss, the square of the softmax's log-normaliser, in the training loss. 0: off. Evaluations do
    not use it."""
    loss_chunks: Annotated[int | None, Range(1, 1024), Flag()] = None
    """Number of chunks of the vocabulary in which the head computes its logits and the loss. The logits of one chunk
    exist at a time. With more than one, backward computes them again. Default: the fewest with at most 2 GiB of
    logits."""
    memory_check: bool = True
    """Refuses a run that by formula needs more memory than there is, before anything is allocated, and says what would
    fit (docs/guides/memory.md)."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        for name in ("eval_interval", "eval_iters") if self.skip_train else ():
            if getattr(self, name) == 0 and not wrong & {"skip_train", name}:
                off = f"--{name.replace('_', '-')} 0"
                yield f"--skip-train only evaluates, which {off} turns off: leave one of them out"
        if not wrong & {"recompute", "recompute_num_layers"} and self.recompute_num_layers and self.recompute != "full":
            yield (
                f"--recompute-num-layers {self.recompute_num_layers} has no effect with --recompute {self.recompute}: "
                "leave it out, or use --recompute full"
            )
        if self.offload_activations and "offload_activations" not in wrong:
            if self.recompute == "light" and "recompute" not in wrong:
                yield (
                    "--offload-activations is not possible with --recompute light, which chooses for each tensor what "
                    "is kept: use --recompute none, selective or full"
                )
            if self.compile and "compile" not in wrong:
                yield (
                    "--offload-activations is not possible with --compile, whose code keeps its activations itself: "
                    "leave one of them out"
                )
        if self.recompute != "full" and "recompute" not in wrong:
            how = f"--recompute {self.recompute}"
            yield from self.without_effect(("distribute_saved_activations",), wrong, how, "--recompute full")
        if not self.compile and "compile" not in wrong:
            yield from self.without_effect(("compile_backend",), wrong, "--no-compile", "--compile")


@dataclass(frozen=True, kw_only=True)
class ResolvedTraining(TrainingConfig):
    """The training section of a run whose number of processes is known."""

    global_batch_size: int = field()
    eval_iters: int = field()


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What a run loads, saves and keeps, and when it ends."""

    load: Annotated[str | None, Flag(metavar="DIR|auto")] = None
    """Resumes from a checkpoint. DIR: the directory of a checkpoint, or the output directory of a run, for its newest
    intact checkpoint. auto: the newest intact checkpoint in --output-dir, or a fresh start if there is none. Default: a
    fresh start."""
    init_from_hf: Annotated[str | None, Flag(metavar="DIR")] = None
    """Starts from the weights of a Hugging Face transformers directory. Its config.json sets the shape of the model; a
    flag that contradicts it is refused. Default: weights drawn from --seed."""
    ignore_config_field: Annotated[str | None, Flag(metavar="NAME[,NAME]")] = None
    """Fields of the config.json of --init-from-hf to leave out, for fields that do not change what the model computes.
    Default: none."""
    save_interval: Annotated[int | None, Range(1)] = None
    """Number of steps between checkpoints. Default: only at the end of the run."""
    keep_last: Annotated[int | None, Range(1)] = None
    """Number of newest checkpoints to keep. Older ones are deleted after a newer one is published. Default: keep
    all."""
    keep_every: Annotated[int | None, Range(1)] = None
    """Keeps every checkpoint whose step is a multiple of this, in addition to --keep-last, which it needs. Default:
    keep only those of --keep-last."""
    async_save: bool = False
    """Saves in the background. Training waits only while the state is copied to host memory."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """What to do when a checkpoint or a line of metrics.jsonl cannot be written. stop: all ranks stop. warn: log a
    warning and continue, except for the last checkpoint of the run."""
    exit_interval: Annotated[int | None, Range(1)] = None
    """Saves and ends the run at the first step that is a multiple of this. Default: end at --train-iters."""
    exit_duration_minutes: Annotated[float | None, Range(above=0), Flag(("--exit-duration-in-mins",))] = None
    """Saves and ends the run after the first step that finishes this many minutes after its start. Default: no
    limit."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if self.init_from_hf is None:
            yield from self.without_effect(("ignore_config_field",), wrong, "no --init-from-hf", "--init-from-hf")
        if self.keep_every is not None and self.keep_last is None and not wrong & {"keep_every", "keep_last"}:
            yield (
                f"--keep-every {self.keep_every} has no effect without --keep-last, because every checkpoint is kept: "
                "leave it out, or use --keep-last"
            )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """What is logged, how often, and where metrics go."""

    log_interval: Annotated[int, Range(1)] = 10
    """Number of steps between log lines, and between lines of metrics.jsonl."""
    csv: bool = False
    """Also writes the metrics to OUTPUT_DIR/metrics.csv, one column per metric."""
    tensorboard_dir: Annotated[str | None, Flag(metavar="DIR")] = None
    """Also writes the metrics to this directory, as event files that TensorBoard reads. Default: no event files."""
    wandb_project: Annotated[str | None, Flag(metavar="NAME")] = None
    """Also sends the metrics to this project of Weights & Biases. Needs pip install wandb. A resumed run continues the
    W&B run whose id is in OUTPUT_DIR/wandb_run_id. Default: no W&B."""
    wandb_entity: Annotated[str | None, Flag(metavar="NAME")] = None
    """User or team of W&B that the run belongs to. Default: that of the API key."""
    wandb_name: Annotated[str | None, Flag(("--wandb-exp-name",), metavar="NAME")] = None
    """Display name of the W&B run. Default: the name of --output-dir."""
    wandb_group: Annotated[str | None, Flag(metavar="NAME")] = None
    """Group of the W&B run. Default: no group."""
    wandb_mode: Literal["online", "offline"] = "online"
    """How W&B runs. online: sends the metrics while the run trains. offline: writes them to OUTPUT_DIR/wandb, for wandb
    sync, without network and API key."""
    profile_steps: Annotated[str | None, Flag(metavar="A:B")] = None
    """Profiles the steps A to B, both included, with torch.profiler. Every rank writes a Chrome trace to
    OUTPUT_DIR/profile, and on an accelerator a snapshot of its memory. Default: no profile."""
    trace: bool = False
    """Writes OUTPUT_DIR/trace.json, a timeline of what every rank does in the steps after the first. Perfetto and
    tools/draw_schedule.py read it."""
    trace_steps: Annotated[int | None, Range(1)] = None
    """Number of steps that --trace records. Default: 3."""
    peak_tflops: Annotated[float | None, Range(above=0)] = None
    """Peak speed of one device in TFLOP/s, dense and in the format of --precision. The reported MFU is a share of it.
    Default: that of the data sheet, for a known device."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if not wrong & {"trace", "trace_steps"} and self.trace_steps is not None and not self.trace:
            yield f"--trace-steps {self.trace_steps} has no effect without --trace: leave it out, or use --trace"
        if self.wandb_project is None and "wandb_project" not in wrong:
            infos = field_infos(type(self))
            for name in ("wandb_entity", "wandb_name", "wandb_group", "wandb_mode"):
                value = getattr(self, name)
                if name not in wrong and value != infos[name].default:
                    yield (
                        f"{flag_and_value(name, value)} has no effect without --wandb-project: leave it out, or use "
                        "--wandb-project NAME"
                    )
        if "profile_steps" not in wrong:
            try:
                self.profiled_steps()
            except ValueError as error:
                yield str(error)

    @property
    def traced_steps(self) -> int:
        """The number of steps that --trace records; 0 without it."""
        if not self.trace:
            return 0
        return _TRACED_STEPS if self.trace_steps is None else self.trace_steps

    def profiled_steps(self) -> range:
        """The numbers of the steps of --profile-steps; empty without it.

        Raises:
            ValueError: it is not A:B with 1 <= A <= B.
        """
        if self.profile_steps is None:
            return range(0)
        ends = re.fullmatch(r"([0-9]{1,99}):([0-9]{1,99})", self.profile_steps)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2]):
            raise ValueError(
                f"--profile-steps {self.profile_steps} must be A:B, two step numbers with 1 <= A <= B: use, for "
                "example, 10:12"
            )
        return range(int(ends[1]), int(ends[2]) + 1)


def _as_number(text: str) -> float | None:
    try:
        return parse_float(text.strip())
    except ValueError:
        return None
