"""Learn which advertisements are clicked: embedding tables over all ranks, the rest of the model on each.

    torchrun --nproc-per-node 4 examples/recommender/recommender.py
    torchrun --nproc-per-node 4 examples/recommender/recommender.py --data train.txt --model deepfm

Without --data the samples are made up. With 1, 2 or 4 processes it prints the same losses and the same AUC, digit for
digit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from clicks import Clicks, generated, read
from dense_models import MODELS
from hybrid_trainer import Recommender
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import ParallelConfig
from megacore.errors import DataError, UserError
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import join_job

TEST_BATCHES = 8


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """The probability that a clicked sample scores higher than one that is not, ties counted as half (Mann and Whitney
    1947). Both are [n]."""
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]  # from 1; the mean of equal ones
    clicked = labels > 0.5
    positives, negatives = int(clicked.sum()), int((~clicked).sum())
    if not positives or not negatives:
        return float("nan")
    return float(rank[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives)


def batches(options: argparse.Namespace) -> Iterator[Clicks]:
    """First those to test with, then those to learn from."""
    if options.data is not None:
        return read(options.data, options.batch)
    return (generated(number, options.batch) for number in range(TEST_BATCHES + options.steps))


def run(options: argparse.Namespace) -> None:
    """Train, test, and print."""
    _, group = join_job(ParallelConfig(device="cpu"))
    problems = []
    if options.blocks % group.size:
        problems.append(f"--blocks {options.blocks} must be a multiple of the {group.size} processes")
    if options.batch % options.blocks:
        problems.append(f"--batch {options.batch} must be a multiple of --blocks {options.blocks}")
    if problems:
        raise UserError("; ".join(problems))
    if options.save is not None:
        Recommender.require_savable(options.save)
    say = print if group.is_first else lambda *words: None
    source = batches(options)
    test = list(islice(source, TEST_BATCHES))
    if len(test) < TEST_BATCHES:
        raise DataError(f"--data {options.data} is too short: the test takes {TEST_BATCHES * options.batch} lines")
    model = Recommender(options.model, group, options.blocks)
    if options.load is not None:
        model.load(options.load)
        if model.step > options.steps:
            raise UserError(f"--load {options.load} is at step {model.step}: --steps {options.steps} must not be less")
        source = islice(source, model.step, None)
    processes = "1 process" if group.size == 1 else f"{group.size} processes"
    say(f"{options.model} on {processes}, batch {options.batch}")
    for batch in islice(source, options.steps - model.step):
        loss = model.train(batch)
        evicted = model.embedding.table.evict(model.step - options.evict_after) if options.evict_after else 0
        if model.step % options.log_every == 0 or model.step == options.steps:
            counts = all_gather_objects((len(model.embedding.table), evicted), group)
            rows, gone = [rows for rows, _ in counts], sum(gone for _, gone in counts)
            of_ranks = " + ".join(map(str, rows))
            say(f"step {model.step:4d} | loss {loss:.6f} | rows {sum(rows)} = {of_ranks} | evicted {gone}")
    scores = torch.cat([model.scores(batch) for batch in test])
    area = area_under_curve(scores, torch.cat([batch.labels for batch in test]))
    say(f"AUC of {len(scores)} samples that were not trained on: {area:.12f}")
    if options.save is not None:
        model.save(options.save)
        say(f"saved step {model.step} in {options.save}")
    if group.size > 1:
        barrier(group)
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line or the data cannot be used."""
    parser = ToolParser(
        prog="recommender.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="dlrm", help="default dlrm")
    parser.add_argument("--data", type=Path, metavar="FILE", help="in Criteo's format; default: samples are made up")
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="the last step (default 200)")
    parser.add_argument("--batch", type=positive, default=256, metavar="N", help="samples of a step (default 256)")
    parser.add_argument("--blocks", type=positive, default=8, metavar="N", help="of a batch (default 8)")
    parser.add_argument("--evict-after", type=positive, metavar="N", help="forget ids that were not seen for N steps")
    parser.add_argument("--log-every", type=positive, default=50, metavar="N", help="steps between lines (default 50)")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write a checkpoint at the end; one that is there is replaced"
    )
    parser.add_argument("--load", type=Path, metavar="DIR", help="continue, on any number of processes")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
