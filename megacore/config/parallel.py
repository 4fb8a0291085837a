"""The section of parallelism: degrees, schedule, division of layers, ZeRO and communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.dimensions import degrees_of
from megacore.config.fields import Flag, Range, Section
from megacore.config.problem import Change, Problem, Values
from megacore.config.rules import Needs, Rule, Settings, rows
from megacore.config.spelling import flag_and_value

AUTO_SCHEDULE = "auto"
"""The value of `--schedule` before a schedule is chosen."""
_LONGEST_TRIED = 8  # pipeline, as a way out

DEVICES = ("auto", "cpu", "cuda", "xpu", "mps", "mtia", "hpu", "npu", "mlu", "musa")
"""Torch's names of devices that a plan knows. A run may have another, which an extension of torch brings."""

ScheduleName = Literal["auto", "1f1b", "gpipe", "interleaved", "zero-bubble", "zb-v", "dualpipev"]
V_SCHEDULES: Sequence[ScheduleName] = ("zb-v", "dualpipev")
"""Those in which the stages go down the ranks and up again: rank r holds stage r, and the r-th from the end."""
STAGED_SCHEDULES: Sequence[ScheduleName] = ("interleaved", *V_SCHEDULES)
"""Those with several stages on a rank."""


def _host_memory(c: Settings) -> Iterator[str]:
    """What --offload-params needs."""
    usual = {"zero_stage": 3, "offload_optimizer": True}
    needed = {name: value for name, value in usual.items() if c.offload_params and getattr(c, name) != value}
    if flags := [flag_and_value(name, value) for name, value in needed.items()]:
        said = f"--offload-params needs {' and '.join(flags)}, with any --dp"
        yield Problem(said, Change(f"use {' '.join(flags)}", needed), c.out("offload_params"))


def _virtual_stages(c: Settings) -> Iterator[str]:
    """That several stages on a rank need a pipeline, and a schedule that has them."""
    virtual, from_file = c.virtual_stages, c.schedule_csv is not None
    is_staged, is_v = (c.schedule in kind and not from_file for kind in (STAGED_SCHEDULES, V_SCHEDULES))
    if is_v and virtual != 2:
        yield Problem(
            f"--schedule {c.schedule} has 2 stages on each rank, and not --virtual-stages {virtual}",
            Change("use --virtual-stages 2", {"virtual_stages": 2}),
            Change("--schedule interleaved", {"schedule": "interleaved"}),
        )
    if virtual == 1 or from_file or is_staged:
        pass
    elif c.pp == 1:
        change: Change | None = None
        for pp in range(_LONGEST_TRIED, 1, -1):  # the shortest pipeline first
            values = {"pp": pp, "schedule": "interleaved"}
            change = Change(f"--pp {pp} --schedule interleaved", values, otherwise=change)
        said = f"--virtual-stages {virtual} needs --schedule interleaved and a pipeline"
        yield Problem(said, change, c.out("virtual_stages"), about=["pp"])
        return
    else:
        yield Problem(
            f"--virtual-stages {virtual} has no effect with --schedule {c.schedule}",
            c.without("virtual_stages"),
            Change("--schedule interleaved", {"schedule": "interleaved"}),
        )
    if virtual > 1 and c.pp == 1:
        without = {"virtual_stages": 1} | ({"schedule": AUTO_SCHEDULE} if is_staged else {})
        yield Problem(
            f"--schedule {c.schedule} needs a pipeline" if is_v else f"--virtual-stages {virtual} needs a pipeline",
            Values(name="pp", among=range(2, 66), near=1, bound="or more"),
            Change(f"leave {'--schedule and ' if is_staged else ''}--virtual-stages out", without),
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How --tp x --cp x --pp x --dp ranks share the work."""

    rules: ClassVar[Sequence[Rule]] = (
        _host_memory,
        *rows("parallel"),
        _virtual_stages,
    )
    former_defaults: ClassVar[Mapping[str, Any]] = {"pipeline_balance": "parameters", "schedule": "1f1b"}

    tp: Annotated[int, Range(1), Flag(("--tensor-model-parallel-size",))] = 1
    """Tensor-parallel degree: neighbouring ranks that share the weights of each layer."""
    pp: Annotated[int, Range(1), Flag(("--pipeline-model-parallel-size",))] = 1
    """Pipeline-parallel degree: ranks that the layers are divided over. At most --num-layers."""
    dp: Annotated[int | None, Range(1), Flag(("--data-parallel-size",))] = None
    """Data-parallel degree: model replicas that share the batch. Default: the number of processes divided by --tp x
    --cp x --pp."""
    cp: Annotated[int, Range(1), Flag(("--context-parallel-size",))] = 1
    """Context-parallel degree: ranks that share each sequence. 2 x --cp must divide --seq-length."""
    cp_comm: Annotated[Literal["auto", "allgather", "ring", "ulysses"], Needs(cp=range(2, 34))] = "auto"
    """How --cp ranks exchange keys and values. allgather: all of them, a layer at a time. ring: in a circle, during
    attention. ulysses: positions for heads. auto: ulysses if it sends the fewest bytes and --tp x --cp is at most 8,
    else ring; allgather for BERT."""
    ep: Annotated[int, Range(1), Flag(("--expert-model-parallel-size",))] = 1
    """Expert-parallel degree: ranks of a pipeline stage that divide the experts. --ep x --etp must divide --dp x --cp x
    --tp."""
    etp: Annotated[int | None, Range(1), Flag(("--expert-tensor-parallel-size",))] = None
    """Ranks that split each expert: --tp or 1. 1 needs --sequence-parallel where --tp is above 1. Default: --tp."""
    schedule: Annotated[ScheduleName, Needs(schedule_csv=None)] = "auto"
    """Pipeline schedule. gpipe: all forwards, then all backwards. 1f1b: one forward, one backward. interleaved: 1f1b
    over --virtual-stages stages per rank. zero-bubble: ZB-H1; with --recompute full it is 1f1b. zb-v, dualpipev: two
    stages per rank, down the ranks and up again. auto: the fastest by simulation that fits into memory."""
    virtual_stages: Annotated[int, Range(1, 10_000)] = 1
    """Stages on each pipeline rank: at least 2 for --schedule interleaved. --schedule auto chooses it. Default: 2 with
    --schedule zb-v and dualpipev, else 1."""
    schedule_csv: Annotated[str | None, Flag(metavar="FILE")] = None
    """Reads the pipeline schedule from a CSV file: one row per rank, one computation per cell (0F0,0F1,0B0,0B1).
    Default: no file."""
    pipeline_balance: Annotated[Literal["time", "parameters", "flops", "uniform"], Needs(pipeline_layout=None)] = "time"
    """What the division of layers into stages balances. time: predicted time, or parameters where its stages do not fit
    into memory. uniform: the number of layers."""
    pipeline_layout: Annotated[str | None, Flag(metavar="E,3*t|4*t,H")] = None
    """Layers of each stage, written out: E embedding, t block, H head. | separates stages, commas separate layers.
    Default: balanced as --pipeline-balance says."""
    zero_stage: Annotated[int, Range(0, 3)] = 0
    """What the --dp x --cp ranks shard. 1: optimizer state and master weights. 2: gradients too. 3: parameters too.
    Results are the same for every stage. On one such rank there is nothing to shard."""
    zero_shard_size: Annotated[int | None, Range(2), Needs(zero_stage=(1, 2, 3))] = None
    """Neighbouring --dp x --cp ranks that shard with --zero-stage 1 to 3, such as those of a node. Gradients are
    all-reduced between these groups. Default: all of them."""
    sequence_parallel: bool | None = None
    """Splits norms, dropout and residuals along the sequence over the --tp ranks. --tp must divide --seq-length.
    Default: on with accelerators if --tp divides --seq-length, else off."""
    async_tp: bool = False
    """Linear layers multiply while pieces of their input and output travel between the --tp ranks. Needs
    --sequence-parallel."""
    offload_optimizer: bool = False
    """ZeRO-Offload: master weights and optimizer state stay in host memory and are updated there."""
    offload_params: bool = False
    """Keeps parameters and gradients in host memory too. Needs --zero-stage 3 and --offload-optimizer."""
    bucket_size_mb: Annotated[float, Range(above=0, high=65536)] = 25.0
    """Size in MiB of the buckets in which gradients are reduced and parameters gathered: at most a quarter of a stage.
    With more than 16 ranks buckets grow, and on a GPU with one."""
    overlap_grad_reduce: bool = True
    """Reduces gradients over --dp during backward."""
    overlap_param_gather: bool = True
    """Gathers updated parameters during the next forward, with --zero-stage 1 or 2."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, or torch's name of another accelerator. auto: cuda if available, else
    cpu."""
    distributed_timeout_minutes: Annotated[float, Range(0.05, 10080)] = 10.0
    """Minutes that a collective waits for a missing rank before the run fails."""

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
    def is_one_by_one(self) -> bool:
        """Whether each microbatch goes forward and backward before the next one: one pipeline rank by 1F1B."""
        return self.pp == 1 and self.schedule_csv is None and self.schedule_name == "1f1b"

    @property
    def may_split_backward(self) -> bool:
        """Whether the schedule may compute the gradients of inputs and of weights separately."""
        return self.schedule in ("zero-bubble", *V_SCHEDULES) or self.schedule_csv is not None


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
class StagesThatFit(ResolvedParallel):
    """The parallel section of a run whose stages are balanced by parameters because those balanced by time do not fit
    into memory. A file keeps time, because another device may have the memory."""

    def as_written(self) -> dict[str, Any]:
        return super().as_written() | {"pipeline_balance": "time"}


@dataclass(frozen=True, kw_only=True)
class ChosenScheduleThatFits(ChosenSchedule, StagesThatFit):
    """Both."""
