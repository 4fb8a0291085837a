"""What Muon's update takes on one process and on replicas with ZeRO 1: processor time, communication, memory.

    python -m benchmarks.muon                 # the figures of docs/reports/measured.md
    python -m benchmarks.muon --ranks 2 --hidden 512

The matrices have the shapes of Llama's blocks. Processor time is that of a rank's one thread in `update_weights`:
norm, clipping, Newton-Schulz and AdamW, without waiting for others. Of several steps the least counts. Ranks may share
cores: their wall-clock time is no multiple of this.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.workload import LLAMA, add_sizes
from megacore.data.loading.loader import Microbatch
from megacore.optim import muon
from megacore.optim.newton_schulz import orthogonalized
from megacore.parallel.mesh import build_mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from tests.distributed import run_distributed
from tools.generated_pages import table


class Found(NamedTuple):
    """Of one rank: seconds of its processor in the update, and in Newton-Schulz; FLOPs of Newton-Schulz; seconds of
    gathering the updated parameters, and bytes that the rank receives; matrix elements of its shard, and of the
    largest matrix."""

    update: float
    iteration: float
    flops: int
    gather: float
    received: int
    held: int
    largest: int


class Counted:
    """Processor time and FLOPs of Newton-Schulz."""

    def __init__(self) -> None:
        self.seconds, self.flops = 0.0, 0

    def orthogonalized(self, matrix: Tensor, *, steps: int) -> Tensor:
        """As the function that it stands for."""
        rows, columns = sorted(matrix.shape[-2:])
        self.flops += steps * (4 * rows**2 * columns + 2 * rows**3) * (matrix.numel() // (rows * columns))
        begin = time.thread_time()
        result = orthogonalized(matrix, steps=steps)
        self.seconds += time.thread_time() - begin
        return result


@contextmanager
def counting() -> Iterator[Counted]:
    """Counts what Muon computes inside."""
    counted = Counted()
    with mock.patch.object(muon, "orthogonalized", counted.orthogonalized):
        yield counted


def measure(rank: int, ranks: int, options: argparse.Namespace) -> Found:
    """The update of one rank."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        step = make_step(ranks, options, directory)
        data_parallel = step.model.data_parallel
        found, gathers = list[tuple[float, float, int]](), list[float]()
        for _ in range(options.steps):
            zeros = torch.zeros(1, options.seq, dtype=torch.int64)
            tokens = torch.randint(options.vocab, zeros.shape)
            step.compute_gradients(
                [Microbatch(index=0, tokens=tokens, labels=tokens, loss_mask=torch.ones(1, options.seq))]
            )
            with counting() as counted:
                begin = time.thread_time()
                step.update_weights()
                found.append((time.thread_time() - begin, counted.seconds, counted.flops))
            for bucket in data_parallel.buckets:
                bucket.wait()
            if ranks > 1:  # the same gathers once more, by themselves
                dist.barrier()
                begin = time.perf_counter()
                data_parallel.publish()
                for bucket in data_parallel.buckets:
                    bucket.wait()
                gathers.append(time.perf_counter() - begin)
    matrices = [local.run.master.numel() for local in data_parallel.segments if local.run.shape is not None]
    received = sum(4 * (b.layout.size - b.layout.shard_size) for b in data_parallel.buckets) if ranks > 1 else 0
    update, iteration, flops = min(found)
    return Found(update, iteration, flops, min(gathers, default=0.0), received, sum(matrices), max(matrices, default=0))


def make_step(ranks: int, options: argparse.Namespace, directory: str) -> TrainStep:
    """A model of Llama's kind, with Muon on ZeRO 1."""
    config = resolved_configuration(
        options,
        directory,
        micro_batch=1,
        ranks=ranks,
        ffn_hidden_size=options.hidden * 8 // 3 // 64 * 64,
        num_query_groups=options.hidden // 128,
        dp=ranks,
        zero_stage=1,
        device="cpu",
        optimizer="muon",
        clip_grad=1.0,
        train_iters=options.steps,
        **LLAMA,
    )
    mesh = build_mesh(config.parallel)
    return TrainStep(GPTTask(config, mesh), config, mesh)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, ranks=4, layers=8, hidden=384, seq=16, steps=4)
    options = parser.parse_args(argv)
    options.heads = options.hidden // 64
    part = options.ranks
    alone, *ranks = (
        found
        for count in (1, part)
        for found in run_distributed(
            measure, count, argparse.Namespace(**{**vars(options), "batch": count}), timeout=600
        )
    )
    head = (
        "",
        "processor time of the update, s",
        "of it Newton-Schulz",
        "GFLOP of Newton-Schulz",
        "matrices, M elements",
    )
    named = [("one process", alone), *((f"rank {rank} of {part}", one) for rank, one in enumerate(ranks))]
    rows = (
        (name, f"{one.update:.3f}", f"{one.iteration:.3f}", f"{one.flops / 1e9:.1f}", f"{one.held / 1e6:.2f}")
        for name, one in named
    )
    print(table(head, rows))
    slowest, most, flops = (max(column) for column in list(zip(*ranks, strict=True))[:3])
    print(
        f"\nSlowest rank, as a multiple of 1/{part} of one process: update {slowest * part / alone.update:.2f}, "
        f"Newton-Schulz {most * part / alone.iteration:.2f}, its FLOPs {flops * part / alone.flops:.3f}."
    )
    gather, received = max(one.gather for one in ranks), ranks[0].received / 2**20
    print(f"Communication: {received:.1f} MiB of updated parameters to each rank, {1e3 * gather:.0f} ms by itself.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
