"""What Muon's update takes on one process and on replicas with ZeRO 1: processor time.

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

import torch

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.workload import LLAMA, add_sizes
from megacore.data.loading.loader import Microbatch
from megacore.parallel.mesh import build_mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from tests.distributed import run_distributed
from tools.generated_pages import table


def measure(rank: int, ranks: int, options: argparse.Namespace) -> tuple[float, int]:
    """Of one rank: seconds of its processor in the update, and matrix elements of its shard."""
    torch.set_num_threads(1)
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        config = resolved_configuration(
            argparse.Namespace(**{**vars(options), "batch": ranks, "heads": options.hidden // 64}),
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
        step = TrainStep(GPTTask(config, mesh), config, mesh)
        for _ in range(options.steps):
            tokens, ones = torch.randint(options.vocab, (1, options.seq)), torch.ones(1, options.seq)
            step.compute_gradients([Microbatch(index=0, tokens=tokens, labels=tokens, loss_mask=ones)])
            begin = time.thread_time()
            step.update_weights()
            seconds.append(time.thread_time() - begin)
            for bucket in step.model.data_parallel.buckets:
                bucket.wait()
    segments = step.model.data_parallel.segments
    return min(seconds), sum(local.run.master.numel() for local in segments if local.run.shape is not None)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, ranks=4, layers=8, hidden=384, seq=16, steps=4)
    options = parser.parse_args(argv)
    part = options.ranks
    alone, *ranks = (found for count in (1, part) for found in run_distributed(measure, count, options, timeout=600))
    named = [("one process", alone), *((f"rank {rank} of {part}", one) for rank, one in enumerate(ranks))]
    rows = ((name, f"{seconds:.3f}", f"{held / 1e6:.2f}") for name, (seconds, held) in named)
    print(table(("", "processor time of the update, s", "matrices, M elements"), rows))
    print(f"\nSlowest rank, as a multiple of 1/{part} of one process: {max(ranks)[0] * part / alone[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
