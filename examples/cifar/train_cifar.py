"""Train an image classifier: data parallel, in a pipeline, with ZeRO, with metrics and checkpoints.

    python examples/cifar/train_cifar.py
    torchrun --nproc-per-node 4 examples/cifar/train_cifar.py --pp 2 --zero-stage 1 --tensorboard output/cifar/events
    torchrun --nproc-per-node 8 examples/cifar/train_cifar.py --data cifar-10-batches-bin --steps 5000 --save output/net

Every layout prints the same losses, to the last digit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from images import Images, load
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import LoggingConfig, OptimizerConfig, ParallelConfig
from megacore.config.dimensions import fill_degrees
from megacore.config.missing_files import unwritable
from megacore.errors import ConfigError, UserError
from megacore.parallel.mesh import world_size
from megacore.train.engine import PipelineEngine
from mixture_cnn import layers

PIECES = 8  # of a batch: microbatches of all replicas together, on every layout


def make_engine(options: argparse.Namespace) -> PipelineEngine:
    """The engine for this layout.

    Raises:
        UserError: the replicas cannot share the batch.
    """
    parallel = ParallelConfig(pp=options.pp, zero_stage=options.zero_stage, schedule=options.schedule)
    replicas = fill_degrees(parallel, world_size())["dp"]
    problems = []
    if PIECES % max(replicas, 1):
        problems.append(f"{world_size()} processes with --pp {options.pp} are {replicas} replicas: use 1, 2, 4 or 8")
    if options.batch % PIECES:
        problems.append(f"--batch {options.batch} must be a multiple of {PIECES}")
    if problems:
        raise UserError("; ".join(problems))
    events = None if options.tensorboard is None else str(options.tensorboard)
    return PipelineEngine(
        layers(),
        loss=F.cross_entropy,
        parallel=parallel,
        num_microbatches=PIECES // max(replicas, 1),
        optimizer=OptimizerConfig(
            lr=options.lr,
            min_lr=options.lr / 20,
            lr_decay_style="cosine",
            lr_warmup_iters=options.steps // 10,
            weight_decay=0.05,
            clip_grad=1.0,
        ),
        train_iters=options.steps,
        seed=1,
        reproducible=True,
        logging=LoggingConfig(tensorboard_dir=events),
    )


def right_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """How many images of a microbatch are classified as they should be."""
    return (logits.argmax(dim=1) == labels).sum()


def accuracy(engine: PipelineEngine, test: Images) -> float:
    """Share of the test images that are classified as they should be."""
    return engine.evaluate(engine.split(test.pixels, test.labels), metric=right_answers)


def run(options: argparse.Namespace) -> None:
    """Train, test, save."""
    written = {"--save": options.save, "--tensorboard": options.tensorboard}
    if problems := [line for flag, path in written.items() if path is not None for line in unwritable(flag, path)]:
        raise ConfigError(problems)
    train, test = load(options.data)
    engine = make_engine(options)
    if options.load is not None:
        engine.load(options.load)
    while engine.step < options.steps:
        loss = float(engine.train_batch(engine.split(*train.batch(engine.step, options.batch))))
        is_last = engine.step == options.steps
        if is_last or engine.step % options.log_every == 0:
            share = accuracy(engine, test)
            engine.log({"train/loss": loss, "train/lr": engine.lr, "eval/accuracy": share})
            if engine.mesh.world.is_first:
                print(
                    f"step {engine.step:5d} | loss {loss:.6f} | lr {engine.lr:.2e} | accuracy {share:.1%}", flush=True
                )
        if options.save is not None and (is_last or engine.step % options.save_every == 0):
            engine.save(options.save)
    engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line or the data cannot be used."""
    parser = ToolParser(
        prog="train_cifar.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="CIFAR-10's *.bin files; default: images are made up")
    parser.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=0, help="default 0")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "zero-bubble"), default="1f1b", help="default 1f1b")
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="default 200")
    parser.add_argument("--batch", type=positive, default=64, metavar="N", help="images of a step (default 64)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the largest learning rate (default 3e-3)")
    parser.add_argument("--log-every", type=positive, default=20, metavar="N", help="steps between tests (default 20)")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write losses and accuracies for TensorBoard")
    parser.add_argument("--save", type=Path, metavar="DIR", help="where checkpoints go")
    parser.add_argument("--save-every", type=positive, default=100, metavar="N", help="steps (default 100)")
    parser.add_argument("--load", type=Path, metavar="DIR", help="continue from the newest checkpoint there")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
