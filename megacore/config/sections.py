"""The sections of a run's configuration: parallel, data, training and logging; model_section.py, update_sections.py and
checkpoint_section.py have the rest.

A field is a flag (`num_layers` is `--num-layers`), the string under it is its help text, and its annotation holds its
range and its other names. Each section checks itself in `constraints()`; what must hold between sections stands in
config.py, which is also where the rest of the package imports these classes from. A size's upper bound is far beyond
any use: a slip of the finger is refused, instead of making lists or tensors until the machine stands still.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How the processes share the work: --tp x --pp x --dp is the number of processes."""

    tp: Annotated[int, Range(1), Flag(("--tensor-model-parallel-size",))] = 1
    """Tensor-parallel degree: the ranks, neighbours of each other, that share each layer's weights."""
    pp: Annotated[int, Range(1), Flag(("--pipeline-model-parallel-size",))] = 1
    """Pipeline-parallel degree: the stages that the layers are dealt out to; at most --num-layers."""
    dp: Annotated[int | None, Range(1), Flag(("--data-parallel-size",))] = None
    """Data-parallel degree: the replicas that share the batch. None: the number of processes / (--tp x --pp)."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """Order of the pipeline's work. gpipe: all forwards first. interleaved: --virtual-stages thin stages a rank, and a
    bubble that many times smaller. zero-bubble: weight gradients fill the bubble down to a third (ZB-H1)."""
    virtual_stages: Annotated[int, Range(1, 10_000)] = 1
    """Stages that each pipeline rank holds; --schedule interleaved needs 2 or more."""
    schedule_csv: Annotated[str | None, Flag(metavar="FILE")] = None
    """A schedule of your own instead of --schedule: a row a rank, a computation a cell (0F0,0F1,0B0,0B1)."""
    pipeline_balance: Literal["parameters", "flops", "uniform"] = "parameters"
    """What counts when layers are dealt out to stages: parameters, operations, or their number."""
    pipeline_layout: Annotated[str | None, Flag(metavar="E,3*t|4*t,H")] = None
    """Layers of each stage by hand: stages separated by |, their layers by commas, E the embedding, t a block, H the
    head. None: balanced."""
    zero_stage: Annotated[int, Range(0, 3)] = 0
    """What the --dp ranks divide among themselves. 0: nothing. 1: optimizer state and master weights. 2: gradients too.
    3: parameters too. No stage changes a result."""
    sequence_parallel: bool = False
    """Splits norms, dropout and residuals along the sequence over --tp, which must divide --seq-length."""
    offload_optimizer: bool = False
    """Keeps master weights and moments in host memory and updates them there (ZeRO-Offload), while the device keeps
    parameters and gradients."""
    bucket_size_mb: Annotated[float, Range(above=0, high=65536)] = 25.0
    """Size of the buckets in which gradients are reduced and parameters gathered over --dp, in MiB; at most a quarter
    of a stage."""
    overlap_grad_reduce: bool = True
    """Reduces gradients over --dp while backward goes on."""
    overlap_param_gather: bool = True
    """Gathers updated parameters (--zero-stage 1, 2) while the next forward begins."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, or another accelerator by torch's name for it. auto: cuda where there is one,
    else cpu. Communication is NCCL on cuda and gloo on cpu."""
    distributed_timeout_minutes: Annotated[float, Range(0.05, 10080)] = 10.0
    """Minutes that a collective waits for a missing rank before the run fails; at most a week."""

    @property
    def may_split_backward(self) -> bool:
        """Whether the schedule may ask for the gradients of inputs and weights apart."""
        return self.schedule == "zero-bubble" or self.schedule_csv is not None

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if self.schedule_csv is not None:
            file = f"--schedule-csv {self.schedule_csv}"
            yield from self.without_effect(("schedule",), wrong, file, "it without a file")
        if self.pipeline_layout is not None:
            layout = f"--pipeline-layout {self.pipeline_layout}"
            yield from self.without_effect(("pipeline_balance",), wrong, layout, "it without a layout")
        if not wrong & {"pp", "schedule", "virtual_stages", "schedule_csv"}:
            yield from self._schedule()

    def _schedule(self) -> Iterator[str]:
        schedule, virtual, own = self.schedule, self.virtual_stages, self.schedule_csv is not None
        if schedule == "interleaved" and virtual == 1 and not own:
            yield "--schedule interleaved needs several stages a rank: give --virtual-stages 2 or more, or use 1f1b"
        if schedule != "interleaved" and virtual > 1 and not own:
            yield (
                f"--virtual-stages {virtual} has no effect with --schedule {schedule}: "
                "leave it out, or use --schedule interleaved"
            )
        if self.pp == 1 and virtual > 1:
            yield f"--virtual-stages {virtual} needs a pipeline: use --pp 2 or more, or leave --virtual-stages out"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What the model reads."""

    data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """Prefix of the preprocessed dataset (PREFIX.bin and PREFIX.idx); several for a blend in proportion to their
    tokens, or WEIGHT PREFIX WEIGHT PREFIX ... for a weighted one."""
    split: Annotated[str, Flag(metavar="A,B,C")] = "949,50,1"
    """Shares of the documents for training, validation and test, in any unit; missing ones are 0."""
    tokenizer: Annotated[str | None, Flag(("--tokenizer-model",), metavar="PATH")] = None
    """A tokenizer.json, a directory that holds one (also a transformers directory), or a SentencePiece .model."""
    seq_length: Annotated[int, Range(1, 100_000_000)] = 1024
    """Tokens of one sample."""
    mock_data: bool = False
    """Trains on generated tokens instead of a dataset; needs --vocab-size or --tokenizer."""
    num_workers: Annotated[int, Range(0, 64)] = 0
    """Processes a rank that prepare batches ahead. 0: in the training process itself."""
    data_cache_path: Annotated[str | None, Flag(metavar="DIR")] = None
    """Directory of the sample index files. None: a cache directory beside each dataset."""
    eod_mask_loss: bool = False
    """Leaves the end-of-document tokens of the input out of the loss; needs --tokenizer."""

    def blend(self) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
        """The prefixes of --data-path and their weights, None where none are given.

        Raises:
            ValueError: weights and prefixes do not alternate, or a weight is not a positive number.
        """
        path = self.data_path
        if len(path) < 2 or _as_number(path[0]) is None:
            return path, None
        weights = [_as_number(w) for w in path[::2]]
        if len(path) % 2 or None in weights:
            raise ValueError(
                f"--data-path {' '.join(path)} mixes weights and prefixes: "
                "use WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes only"
            )
        good = tuple(w for w in weights if w is not None and math.isfinite(w) and w > 0)
        if len(good) < len(weights):
            raise ValueError(
                f"--data-path {' '.join(path)} has a weight that is not above 0: "
                "leave that dataset out, or give it a positive weight"
            )
        return path[1::2], good

    def split_shares(self) -> tuple[float, float, float]:
        """The shares of training, validation and test, which sum to 1.

        Raises:
            ValueError: --split is not one to three non-negative numbers, of which the first is positive.
        """
        shares = [_as_number(part) for part in self.split.split(",")]
        good = [s for s in shares if s is not None and math.isfinite(s) and s >= 0]
        if len(good) != len(shares) or len(good) > 3:
            raise ValueError(
                f"--split {self.split} must be one to three numbers of 0 or more, separated by commas: "
                "use, for example, 949,50,1"
            )
        if good[0] <= 0:
            raise ValueError(
                f"--split {self.split} leaves nothing to train on: make the first number positive, for example 949,50,1"
            )
        train, valid, test = (s / sum(good) for s in [*good, 0.0, 0.0][:3])
        return train, valid, test

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        for name, parse in (("data_path", self.blend), ("split", self.split_shares)):
            try:
                if name not in wrong:
                    parse()
            except ValueError as error:
                yield str(error)
        if self.mock_data and self.data_path:
            yield f"--mock-data and --data-path {' '.join(self.data_path)} exclude each other: leave one of them out"
        if not self.mock_data and not self.data_path and not wrong & {"data_path", "mock_data"}:
            yield "--data-path is missing: give the PREFIX that tools/preprocess_data.py wrote, or --mock-data"
        if self.eod_mask_loss and self.tokenizer is None and not wrong & {"eod_mask_loss", "tokenizer"}:
            yield "--eod-mask-loss needs the end-of-document token: give --tokenizer, or leave --eod-mask-loss out"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """The training loop: batches, length, evaluation, and where results go."""

    micro_batch_size: Annotated[int, Range(1, 1_000_000)] = 1
    """Samples of one forward pass on one data-parallel replica."""
    global_batch_size: Annotated[int | None, Range(1, 1_000_000)] = None
    """Samples of one step over all replicas; a multiple of --micro-batch-size x --dp. None: one microbatch a
    replica."""
    train_iters: Annotated[int, Range(1)]
    """Steps to train, counted from the start of the run."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 1234
    """Seed of initial weights, dropout and data order. Two runs with the same seed are bitwise equal."""
    reproducible: bool = False
    """Makes losses and weights bitwise the same for every --pp, --dp, --zero-stage and schedule, with the same
    --micro-batch-size and --tp. Slower, and gradients take 8 bytes while they are added up."""
    eval_interval: Annotated[int, Range(0)] = 1000
    """Steps between evaluations on the validation split. 0: no evaluation."""
    eval_iters: Annotated[int, Range(1)] = 100
    """Global batches of one evaluation. To turn evaluation off, use --eval-interval 0."""
    output_dir: Annotated[str, Flag(("--save",), metavar="DIR")] = "output"
    """Directory for checkpoints, metrics.jsonl and the resolved config.toml; made where it does not exist."""
    max_bad_steps: Annotated[int, Range(1)] = 10
    """Steps in a row with a loss or gradient that is not finite after which the run stops. Each of them leaves the
    weights as they were. Where the loss scale is dynamic only the loss counts."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in backward instead of kept. selective: attention between its projections. full: whole
    blocks, of which only the input is kept. No choice changes a bit of the result."""
    recompute_num_layers: Annotated[int | None, Range(1), Flag()] = None
    """Blocks of each pipeline stage, from its first, that --recompute full applies to. None: all."""
    attention: Literal["auto", "sdpa", "fused-softmax"] = "auto"
    """How attention is computed. sdpa: torch's fused operator. fused-softmax: scores, softmax and mix one after the
    other, which keeps the weights in memory. auto: sdpa."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of norms, activations, softmax and cross-entropy. auto: Triton on cuda where it is installed, else
    plain torch."""
    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    """Share of the target probability that is spread evenly over the vocabulary. 0: off. Evaluations leave it
    out."""
    z_loss: Annotated[float, Range(0)] = 0.0
    """Weight of the squared log-normaliser of the softmax in the loss. 0: off. Evaluations leave it out."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if not wrong & {"recompute", "recompute_num_layers"} and self.recompute_num_layers and self.recompute != "full":
            yield (
                f"--recompute-num-layers {self.recompute_num_layers} has no effect with --recompute {self.recompute}: "
                "leave it out, or use --recompute full"
            )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """What is reported while training."""

    log_interval: Annotated[int, Range(1)] = 10
    """Steps between log lines and between lines of metrics.jsonl."""
    trace: bool = False
    """Write OUTPUT_DIR/trace.json: what every rank did in the steps after the first, for Perfetto and draw_schedule."""
    trace_steps: Annotated[int | None, Range(1)] = None
    """Steps that --trace takes. None: 3."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if not wrong & {"trace", "trace_steps"} and self.trace_steps is not None and not self.trace:
            yield f"--trace-steps {self.trace_steps} has no effect without --trace: leave it out, or give --trace"


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
