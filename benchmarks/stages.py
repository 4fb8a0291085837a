"""Tokens per second of a pipeline by what its stages balance and by its schedule, in turns.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/stages.py

The GPT of the other comparisons (4 layers, hidden 256, sequence 256, vocabulary 8192, untied head; AdamW, no clipping)
on 4 microbatches of 2 sequences. Every round takes each of them once; ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.workload import add_sizes, configuration, megacore_step, megacore_trainer
from megacore.config import ParallelConfig
from megacore.parallel.mesh import build_mesh, leave, world_size
from megacore.train.ending import exit_with

KINDS = {
    "1f1b, by parameters": ParallelConfig(schedule="1f1b", pipeline_balance="parameters"),
    "1f1b, by time": ParallelConfig(schedule="1f1b", pipeline_balance="time"),
    "zero-bubble, by time": ParallelConfig(schedule="zero-bubble", pipeline_balance="time"),
}
"""The defaults of version 0.1, the balance by time, and what --schedule auto is with it."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, microbatches=4, rounds=12)
    sizes = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        configs = {
            name: configuration(
                sizes, directory, parallel=replace(kind, pp=world_size()), micro_batch=sizes.batch // sizes.microbatches
            )
            for name, kind in KINDS.items()
        }
        mesh = build_mesh(next(iter(configs.values())).parallel)
        steps = {name: megacore_step(megacore_trainer(config, mesh)) for name, config in configs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(sizes.rounds + 1):
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                if number:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
        if mesh.world.is_first:
            report(seconds, sizes.batch * sizes.seq)
    leave(mesh)
    return 0


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    """A Markdown table; ratios to the first row with their quartiles."""
    first, *_ = seconds.values()
    print(f"\n| {tokens:,} tokens per step | tokens/s | / the first |\n|---|---|---|")
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles((a / b for a, b in zip(first, values, strict=True)), n=4)
        rate = tokens / statistics.median(values)
        print(f"| {name} | {rate:,.0f} | {middle:.3f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    exit_with(main())
