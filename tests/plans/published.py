"""Measured runs that others have published, as configurations of this trainer and descriptions of their software.

The rows and their sources are in published.toml, megatron_a100.csv and single_node_a100.csv.
"""

from __future__ import annotations

import csv
import functools
import multiprocessing
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.models.outline import ModelLayer
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.memory import RankMemory
from megacore.plan.planner import Plan, make_plan, step_flops
from megacore.plan.software import MEGATRON_LM, SOFTWARE, Software
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


def shape(hidden: int, layers: int, heads: int, *, sequence: int = 2048) -> str:
    """Flags of a model."""
    return (
        f"--hidden-size {hidden} --num-layers {layers} --num-attention-heads {heads} --vocab-size 51200 "
        f"--seq-length {sequence} --hidden-dropout 0.1 --attention-dropout 0.1"
    )


def whole(words: str, parts: Mapping[str, str]) -> str:
    """Words with all their parts, for which `{name}` stands in them."""
    return whole(words.format(**parts), parts) if "{" in words else words


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OLD = _TABLES["parts"]["old"]


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


def _runs(name: str, model: str | None = None) -> Iterator[Run]:
    """A set of published.toml, or the runs of one model in it."""
    for row in _TABLES["runs"][name]["rows"]:
        if model not in (None, row["model"]):
            continue
        run = Run(
            model=row["model"],
            flags=whole(row["flags"], _TABLES["parts"]),
            cluster=JEAN_ZAY if row["cluster"] == "jean-zay" else CLUSTERS[row["cluster"]],
            software=SOFTWARE[row["software"]],
            seconds=row.get("seconds"),
            gib=row["mib"] / 1024 if "mib" in row else row.get("gib"),
        )
        if "tflops" in row:
            run = _with_tflops(run, row["tflops"], hardware=True)
        elif "model_tflops" in row:
            run = _with_tflops(run, row["model_tflops"], hardware=False)
        yield run


def blackwell_runs() -> Iterator[Run]:
    """Dense models on GB200, to which its efficiency in products is fitted."""
    return _runs("blackwell")


def held_out_runs() -> Iterator[Run]:
    """Runs that no constant was fitted to."""
    return chain(_runs("held_out"), own_runs())


def own_runs() -> Iterator[Run]:
    """megacore on one H100, a microbatch in a step; `gib`: of the tensors alone."""
    return _runs("own")


def _with_tflops(run: Run, tflops: float, *, hardware: bool) -> Run:
    """The run with the seconds that follow from a device's FLOPs."""
    config = run.config
    flops = step_flops(config, attention="full", hardware=hardware)
    return replace(run, seconds=flops / config.parallel.ranks / tflops / 1e12)


def timed_runs() -> list[Run]:
    """All with a time."""
    return [*megatron_runs(), *_runs("timed")]


def memory_runs() -> list[Run]:
    """All with a memory."""
    return list(_runs("memory"))


(BLOOM,) = _runs("timed", "bloom")
