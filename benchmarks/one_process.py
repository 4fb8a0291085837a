"""Tokens per second of megacore on one process beside a plain single-file torch GPT-2 of the same shape.

    python benchmarks/one_process.py --rounds 8 --threads 2

Both run eagerly, in this process, with the same threads, batch, shapes and optimizer settings. Rounds alternate
between the two, and the median of the pairwise ratios is reported, of wall time and of CPU time: on a machine that
others use too, the second is the steadier.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.workload import PlainGPT, Step, add_sizes, configuration, dataset, megacore_step, megacore_trainer
from megacore.config import ParallelConfig, ResolvedConfig
from megacore.parallel.mesh import Mesh


def plain_step(config: ResolvedConfig) -> Step:
    """One training step of the plain model, gradients accumulated over the same microbatches."""
    training, o = config.training, config.optimizer
    model = PlainGPT(config)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=o.lr, betas=(config.adamw.adam_beta1, config.adamw.adam_beta2), eps=config.adamw.adam_eps, fused=True
    )
    data = dataset(config)
    pieces = training.global_batch_size // training.micro_batch_size
    position = 0

    def step() -> None:
        nonlocal position
        adamw.zero_grad()
        for _ in range(pieces):
            samples = [data[position + i] for i in range(training.micro_batch_size)]
            position += training.micro_batch_size
            tokens, labels = (torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in ("tokens", "labels"))
            (model(tokens, labels) / pieces).backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad) if o.clip_grad else None
        adamw.step()

    return step


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, micro_batch=8, rounds=8, steps=3, threads=2)
    parser.add_argument("--tied", action="store_true")
    a = parser.parse_args(argv)
    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as directory:
        config = configuration(
            a,
            directory,
            parallel=ParallelConfig(device="cpu"),
            micro_batch=a.micro_batch,
            tied=a.tied,
            clip_grad=1.0,
        )
        steps = {
            "megacore": megacore_step(megacore_trainer(config, Mesh(device=torch.device("cpu")))),
            "plain torch": plain_step(config),
        }
        wall: dict[str, list[float]] = {name: [] for name in steps}
        cpu: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
        for _ in range(a.rounds):
            for name, step in steps.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                for _ in range(a.steps):
                    step()
                wall[name].append((time.perf_counter() - start) / a.steps)
                cpu[name].append((time.process_time() - cpu_start) / a.steps)
    for name, seconds in wall.items():
        tokens_per_second = a.batch * a.seq / statistics.median(seconds)
        print(f"{name:12} {tokens_per_second:9,.0f} tokens/s (median of {a.rounds} rounds)")
    for label, times in (("tokens/s", wall), ("tokens per CPU second", cpu)):
        ratios = [theirs / ours for ours, theirs in zip(times["megacore"], times["plain torch"], strict=True)]
        print(
            f"megacore / plain torch, {label}: {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
