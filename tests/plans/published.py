"""Measured runs that others have published, as configurations of this trainer and descriptions of their software.

Sources (docs/reference/planner.md and docs/guides/planner.md say how well they are predicted):

- Megatron-LM on A100: megatron_a100.csv and single_node_a100.csv, which name their own.
- BLOOM-176B: the log of its training and Le Scao et al. 2022 (arXiv 2211.05100); Jean Zay's nodes have four 100 Gb/s
  network cards (Omni-Path) for eight A100-80GB.
- 1.7B to 530B on A100: Narayanan et al. 2021 (arXiv 2104.04473), table 1; micro-batches and stages per rank, which the
  table leaves out, are assumed.
- 22B and 175B with sequence parallelism: Korthikanti et al. 2022 (arXiv 2205.05198), table 5.
- GPT-3 175B and Nemotron-4 15B on H100: NVIDIA's performance recipes for NeMo 24.12.
- Llama 3.1 405B and Nemotron-4 340B on GB200: NVIDIA's performance recipes (github.com/NVIDIA/dgxc-benchmarking,
  llama3.1/README.md and nemotron/README.md of release 25.05), bf16; recomputation is not stated, and none is assumed.
- Turing-NLG 530B: Smith et al. 2022 (arXiv 2201.11990).
- Llama 3.1 8B: torchtitan's performance page. 1B Llama: nanotron's benchmark table.
- 175B with Megatron-LM on 256 to 1,024 Ampere devices and batch 768: Jiang et al. 2024 (arXiv 2402.15627), table 2.
- Held out, no constant is fitted to them: the other rows of the tables of Narayanan et al. 2021 and Korthikanti et al.
  2022; the rows of Jiang et al. with batch 6144 on up to 12,288 devices; Turing-NLG 530B on more nodes; Llama 3 405B,
  Grattafiori et al. 2024 (arXiv 2407.21783), table 4; the two models of the recipes on H100 (releases 24.09 and
  25.05); megacore itself on one H100 (docs/reports/measured.md).
"""

from __future__ import annotations

import csv
import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.models.outline import ModelLayer
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.memory import RankMemory
from megacore.plan.planner import Plan, make_plan, step_flops
from megacore.plan.software import MEGACORE, MEGATRON_CORE, MEGATRON_DEEPSPEED, MEGATRON_LM, TORCH_EAGER, Software
from megacore.tracer.memory import traced_memory

A100 = CLUSTERS["a100-80g"]
_NETWORK = replace(A100.device.network, bandwidth=4 * 12.5e9 / 8)
JEAN_ZAY = replace(A100, device=replace(A100.device, network=_NETWORK, node_nics=4))
SHAPES = {"megatron-3.6B": (3072, 30, 32), "megatron-18.4B": (6144, 40, 48)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured run.

    Attributes:
        model: rows of one model compete.
        flags: of pretrain_gpt.py.
        seconds: per step; None: not published.
        gib: of the fullest device; None: not published.
    """

    model: str
    flags: str
    cluster: Cluster
    software: Software
    seconds: float | None = None
    gib: float | None = None

    @property
    def config(self) -> ResolvedConfig:
        """The run's configuration."""
        flags = f"--mock-data --train-iters 10 {self.flags}".split()
        if self.flags.count("--pp ") > self.flags.count("--pp 1 "):  # what those trainers do
            flags += ["--pipeline-balance", "parameters"]
            flags += [] if "--schedule" in flags else ["--schedule", "1f1b"]
        if "--tp" in flags and "--sequence-parallel" not in flags:
            flags.append("--no-sequence-parallel")
        return parse_config(flags, prog="test", description="", kind=Config, planned=True)

    @property
    def computed_by(self) -> Cluster:
        """The cluster with the run's software."""
        return replace(self.cluster, software=self.software)

    def plan(self) -> Plan:
        """What is planned of it, with traced memory."""
        return make_plan(self.config, self.computed_by, find_memory=traced)


def traced(
    config: ResolvedConfig, layers: Sequence[ModelLayer], /, *, on_cpu: bool, copies_logits: bool = False
) -> list[RankMemory]:
    """`traced_memory` in a process of its own: this one may have computed gradients, and then none can be forked."""
    arguments = {"on_cpu": on_cpu, "copies_logits": copies_logits}
    return _process().submit(traced_memory, config, layers, **arguments).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def shape(hidden: int, layers: int, heads: int, *, vocabulary: int = 51200, sequence: int = 2048) -> str:
    """Flags of a model."""
    return (
        f"--hidden-size {hidden} --num-layers {layers} --num-attention-heads {heads} --vocab-size {vocabulary} "
        f"--seq-length {sequence} --hidden-dropout 0.1 --attention-dropout 0.1"
    )


OLD = "--precision fp16 --attention fused-softmax --recompute full --no-overlap-grad-reduce"


def megatron_runs() -> Iterator[Run]:
    """Every layout of two models."""
    with (Path(__file__).parent / "megatron_a100.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            flags = (
                f"{shape(*SHAPES[row['model']])} {OLD} --tp {row['tp']} --pp {row['pp']} --dp {row['dp']} "
                f"--micro-batch-size {row['micro_batch']} --global-batch-size {row['global_batch']}"
            )
            seconds = float(row["seconds"])
            yield Run(model=row["model"], flags=flags, cluster=A100, software=MEGATRON_LM, seconds=seconds)


def single_node_runs(every: int = 1) -> Iterator[Run]:
    """Layouts of eight small models on up to eight devices.

    Args:
        every: take one row of so many.
    """
    with (Path(__file__).parent / "single_node_a100.csv").open(encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(line for line in file if not line.startswith("#"))):
            if number % every:
                continue
            hidden, layers = int(row["hidden"]), int(row["layers"])
            flags = (
                f"{shape(hidden, layers, 16, sequence=int(row['sequence']))} {OLD} --tp {row['tp']} --pp {row['pp']} "
                f"--dp {row['dp']} --micro-batch-size {row['micro_batch']} --global-batch-size {row['global_batch']}"
            )
            model = f"hidden {hidden}, {layers} layers"
            yield Run(model=model, flags=flags, cluster=A100, software=MEGATRON_LM, seconds=float(row["seconds"]))


def _table_2021() -> Iterator[Run]:
    rows = [
        ("1.7B", (2304, 24, 24), "--dp 32 --micro-batch-size 16 --global-batch-size 512", 137),
        ("7.5B", (4096, 36, 32), "--tp 4 --dp 32 --micro-batch-size 4 --global-batch-size 512", 142),
        ("39.1B", (8192, 48, 64), "--tp 8 --pp 2 --dp 32 --micro-batch-size 4 --global-batch-size 1536", 138),
        ("145.6B", (12288, 80, 96), "--tp 8 --pp 8 --dp 24 --micro-batch-size 2 --global-batch-size 2304", 148),
        ("529.6B", (20480, 105, 128), "--tp 8 --pp 35 --dp 9 --micro-batch-size 1 --global-batch-size 2520", 163),
    ]
    stages = {"39.1B": 4, "145.6B": 2, "529.6B": 3}
    for name, sizes, layout, tflops in rows:
        flags = f"{shape(*sizes)} {OLD} {layout}"
        if name in stages:
            flags += f" --schedule interleaved --virtual-stages {stages[name]}"
        run = Run(model=f"2021-{name}", flags=flags, cluster=A100, software=MEGATRON_LM)
        yield _with_tflops(run, tflops, hardware=True)


BLOOM = Run(
    model="bloom",
    flags="--preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 --micro-batch-size 2 --zero-stage 1 "
    "--recompute full --precision bf16 --attention fused-softmax",
    cluster=JEAN_ZAY,
    software=MEGATRON_DEEPSPEED,
    seconds=104.70,
)
TURING = Run(
    model="turing-530B",
    flags=f"{shape(20480, 105, 128)} {OLD} --tp 8 --pp 35 --dp 8 --micro-batch-size 1 --global-batch-size 1920",
    cluster=A100,
    software=MEGATRON_DEEPSPEED,
    seconds=60.1,
)


def _sequence_parallel() -> Iterator[Run]:
    flags = "--precision fp16 --attention fused-softmax --recompute selective --sequence-parallel --tp 8"
    small = f"{shape(6144, 48, 64)} {flags} --micro-batch-size 4 --global-batch-size 4"
    large = (
        f"{shape(12288, 96, 96)} {flags} --pp 8 --micro-batch-size 1 --global-batch-size 64 "
        "--schedule interleaved --virtual-stages 3"
    )
    for model, given, seconds in (("2022-22B", small, 1.10), ("2022-175B", large, 13.75)):
        yield Run(model=model, flags=given, cluster=A100, software=MEGATRON_LM, seconds=seconds)


def _nemo() -> Iterator[Run]:
    for ranks, seconds in ((128, 8.309), (512, 8.42)):
        yield Run(
            model="gpt3-175B-h100",
            flags=f"{shape(12288, 96, 96)} --precision bf16 --grad-reduce-dtype bf16 --sequence-parallel --tp 4 --pp 8 "
            f"--dp {ranks // 32} --schedule interleaved --virtual-stages 12 --micro-batch-size 1 "
            f"--global-batch-size {2 * ranks}",
            cluster=CLUSTERS["h100"],
            software=MEGATRON_CORE,
            seconds=seconds,
        )
    for ranks, seconds in ((16, 2.812), (256, 2.852), (2048, 2.887)):
        yield Run(
            model="nemotron-15B-h100",
            flags=f"{shape(6144, 32, 48, vocabulary=256000, sequence=4096)} --num-query-groups 8 --activation relu "
            f"--untie-embeddings-and-output-weights --precision bf16 --sequence-parallel --tp 4 --dp {ranks // 4} "
            f"--zero-stage 1 --micro-batch-size 4 --global-batch-size {4 * ranks}",
            cluster=CLUSTERS["h100"],
            software=MEGATRON_CORE,
            seconds=seconds,
        )


NEMOTRON_340B = (
    "--hidden-size 18432 --num-layers 96 --num-attention-heads 96 --num-query-groups 8 --ffn-hidden-size 73728 "
    "--vocab-size 256000 --seq-length 4096 --activation relu2 --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)


def _recipe(model: str, shape: str, layout: str, cluster: str, seconds: float) -> Run:
    flags = (
        f"{shape} --precision bf16 --grad-reduce-dtype bf16 --sequence-parallel --zero-stage 1 --schedule interleaved "
        f"--micro-batch-size 1 {layout}"
    )
    return Run(model=model, flags=flags, cluster=CLUSTERS[cluster], software=MEGATRON_CORE, seconds=seconds)


def blackwell_runs() -> Iterator[Run]:
    """Dense models on GB200, to which its efficiency in products is fitted."""
    for replicas, seconds in ((2, 9.347), (4, 9.484), (8, 9.508)):
        layout = f"--tp 4 --pp 8 --cp 2 --virtual-stages 8 --dp {replicas} --global-batch-size {32 * replicas}"
        yield _recipe("llama-405B-gb200", "--preset llama-3.1-405b", layout, "gb200", seconds)
    for replicas, batch, seconds in (
        (4, 32, 2.189),
        (8, 64, 2.19),
        (16, 128, 2.229),
        (4, 512, 32.66),
        (8, 512, 16.58),
        (16, 512, 8.468),
    ):
        layout = f"--tp 8 --pp 4 --virtual-stages 12 --dp {replicas} --global-batch-size {batch}"
        yield _recipe("nemotron-340B-gb200", NEMOTRON_340B, layout, "gb200", seconds)


def _h100_recipes() -> Iterator[Run]:
    layout = "--tp 8 --pp 9 --cp 2 --virtual-stages 7 --dp 4 --global-batch-size 252"
    yield _recipe("llama-405B-h100", "--preset llama-3.1-405b", layout, "h100", 17.20)
    layout = "--tp 8 --pp 8 --virtual-stages 12 --dp 4 --global-batch-size 64"
    yield _recipe("nemotron-340B-h100", NEMOTRON_340B, layout, "h100", 4.606)


def _table_2024(batch: int, seconds_by_ranks: dict[int, float]) -> Iterator[Run]:
    flags = (
        f"{shape(12288, 96, 128, vocabulary=64000)} --precision bf16 --sequence-parallel --tp 8 --pp 8 --zero-stage 1 "
        f"--micro-batch-size 1 --schedule interleaved --virtual-stages 6 --global-batch-size {batch}"
    )
    for ranks, seconds in seconds_by_ranks.items():
        yield Run(
            model=f"2024-175B-batch-{batch}",
            flags=f"{flags} --dp {ranks // 64}",
            cluster=A100,
            software=MEGATRON_LM,
            seconds=seconds,
        )


def held_out_runs() -> Iterator[Run]:
    """Runs that no constant was fitted to."""
    plain, interleaved = "--schedule 1f1b", "--schedule interleaved --virtual-stages"
    table_2021 = [
        ((3072, 30, 32), f"--tp 2 --dp 32 --micro-batch-size 8 --global-batch-size 512 {plain}", 138),
        ((6144, 40, 48), f"--tp 8 --dp 32 --micro-batch-size 4 --global-batch-size 1024 {plain}", 135),
        ((10240, 60, 80), f"--tp 8 --pp 4 --dp 32 --micro-batch-size 2 --global-batch-size 1792 {interleaved} 5", 140),
        (
            (16384, 96, 128),
            f"--tp 8 --pp 16 --dp 15 --micro-batch-size 1 --global-batch-size 2160 {interleaved} 3",
            155,
        ),
        (
            (25600, 128, 160),
            f"--tp 8 --pp 64 --dp 6 --micro-batch-size 1 --global-batch-size 3072 {interleaved} 2",
            163,
        ),
    ]
    for sizes, layout, tflops in table_2021:
        run = Run(model="2021-others", flags=f"{shape(*sizes)} {OLD} {layout}", cluster=A100, software=MEGATRON_LM)
        yield _with_tflops(run, tflops, hardware=True)
    selective = "--recompute selective --sequence-parallel"
    table_2022 = [
        ((6144, 48, 64), "--micro-batch-size 4 --global-batch-size 4", "--recompute full", 1.42),
        ((12288, 96, 96), f"--pp 8 --global-batch-size 64 {interleaved} 3", "--recompute full", 18.13),
        ((20480, 105, 128), f"--pp 35 --global-batch-size 280 {interleaved} 3", selective, 37.83),
        ((20480, 105, 128), f"--pp 35 --global-batch-size 280 {interleaved} 3", "--recompute full", 49.05),
        ((25600, 128, 160), f"--pp 64 --global-batch-size 512 {plain}", selective, 71.49),
        ((25600, 128, 160), f"--pp 64 --global-batch-size 512 {plain}", "--recompute full", 94.42),
    ]
    for sizes, layout, recompute, seconds in table_2022:
        flags = f"{shape(*sizes)} --precision fp16 --attention fused-softmax --tp 8 {recompute} {layout}"
        yield Run(model="2022-others", flags=flags, cluster=A100, software=MEGATRON_LM, seconds=seconds)
    for replicas, seconds in ((10, 50.2), (12, 44.4)):
        yield replace(
            TURING,
            model="turing-530B-more-nodes",
            flags=TURING.flags.replace("--dp 8", f"--dp {replicas}"),
            seconds=seconds,
        )
    yield from _table_2024(6144, {3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57})
    for ranks, tflops in ((8192, 430), (16384, 400)):
        flags = (
            "--preset llama-3-8b --hidden-size 16384 --num-layers 126 --num-attention-heads 128 --num-query-groups 8 "
            "--ffn-hidden-size 53248 --seq-length 8192 --precision bf16 --sequence-parallel --tp 8 --pp 16 "
            f"--dp {ranks // 128} --zero-stage 1 --micro-batch-size 1 --global-batch-size 2048 {interleaved} 7"
        )
        run = Run(model="llama-405B", flags=flags, cluster=CLUSTERS["h100"], software=TORCH_EAGER)
        yield _with_tflops(run, tflops, hardware=False)
    yield from _h100_recipes()
    yield from own_runs()


def own_runs() -> Iterator[Run]:
    """megacore on one H100, a microbatch in a step; `gib`: of the tensors alone."""
    experts = (
        "--preset mixtral-8x7b --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4 "
        "--ffn-hidden-size 3584 --seq-length 4096"
    )
    measured = (
        ("--preset gpt2-small", 244, 0.5119, 74.45),
        ("--preset gpt2-xl", 17, 0.3856, 68.38),
        (experts, 28, 0.4578, 73.20),
        ("--preset llama-3.2-1b", 5, 0.7549, 70.32),
    )
    for model, sequences, seconds, gib in measured:
        flags = f"{model} --precision bf16 --micro-batch-size {sequences} --global-batch-size {sequences}"
        yield Run(
            model="megacore-one-h100",
            flags=flags,
            cluster=CLUSTERS["h100"],
            software=MEGACORE,
            seconds=seconds,
            gib=gib,
        )


def _with_tflops(run: Run, tflops: float, *, hardware: bool) -> Run:
    """The run with the seconds that follow from a device's FLOPs."""
    config = run.config
    flops = step_flops(config, attention="full", hardware=hardware)
    return replace(run, seconds=flops / config.parallel.ranks / tflops / 1e12)


def timed_runs() -> list[Run]:
    """All with a time."""
    seconds = {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9}
    of_2024 = _table_2024(768, seconds)
    return [*megatron_runs(), *_table_2021(), BLOOM, TURING, *_sequence_parallel(), *_nemo(), *of_2024]


def memory_runs() -> list[Run]:
    """All with a memory."""
    h100 = CLUSTERS["h100"]
    runs = []
    for ranks, gib in ((8, 82.4), (128, 67.0)):  # recomputes all that is cheap, and half of the products
        flags = (
            f"--preset llama-3-8b --precision bf16 --dp {ranks} --zero-stage 3 --micro-batch-size 2 --recompute light "
            f"--global-batch-size {2 * ranks} --seq-length 8192"
        )
        runs.append(Run(model=f"llama-8B-{ranks}", flags=flags, cluster=h100, software=TORCH_EAGER, gib=gib))
    for size, mib in ((1, 15_800), (2, 25_100), (4, 42_900)):
        flags = (
            f"--preset llama-3.2-1b --precision bf16 --grad-reduce-dtype bf16 --dp 16 --zero-stage 1 "
            f"--micro-batch-size {size} --global-batch-size {16 * size} --seq-length 4096"
        )
        runs.append(Run(model=f"llama-1B-{size}", flags=flags, cluster=h100, software=TORCH_EAGER, gib=mib / 1024))
    return runs
