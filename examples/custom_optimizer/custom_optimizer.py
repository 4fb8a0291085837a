"""Train with an optimizer of one's own (signum.py) on any layout and any ZeRO stage.

    python examples/custom_optimizer/custom_optimizer.py
    torchrun --nproc-per-node 4 examples/custom_optimizer/custom_optimizer.py --pp 2 --zero-stage 3

All layouts print the same losses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import OptimizerConfig, ParallelConfig
from megacore.parallel.mesh import build_mesh
from megacore.train.engine import Layer, PipelineEngine
from signum import SignumConfig, register

BATCH, MICROBATCHES, INPUTS, WIDTH, CLASSES = 64, 4, 20, 64, 4
LR, MOMENTUM, WEIGHT_DECAY = 2e-3, 0.9, 0.01

LAYERS = [
    Layer("in", nn.Linear, INPUTS, WIDTH),
    Layer("act1", nn.GELU),
    Layer("mid", nn.Linear, WIDTH, WIDTH),
    Layer("act2", nn.GELU),
    Layer("head", nn.Linear, WIDTH, CLASSES),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels: which of the first inputs is the largest."""
    x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
    return x, x[:, :CLASSES].argmax(dim=1)


def train(parallel: ParallelConfig, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train and print; the losses, and the weights by name."""
    register()
    mesh = build_mesh(parallel)
    engine = PipelineEngine(
        LAYERS,
        loss=F.cross_entropy,
        parallel=parallel,
        mesh=mesh,
        num_microbatches=max(1, MICROBATCHES // mesh.batch.size),
        optimizer=OptimizerConfig(lr=LR, lr_decay_style="constant", weight_decay=WEIGHT_DECAY, clip_grad=0.0),
        optimizer_settings=SignumConfig(signum_momentum=MOMENTUM),
        train_iters=steps,
        reproducible=True,  # a sign makes much of a rounding error: with this flag there are none between layouts
    )
    losses = []
    for step in range(steps):
        losses.append(float(engine.train_batch(engine.split(*batch(step)))))
        if mesh.world.is_first and (step in (0, steps - 1) or (step + 1) % max(1, steps // 8) == 0):
            print(f"step {step + 1:4d} | loss {losses[-1]:.6f}", flush=True)
    weights = engine.state_dict()
    engine.close()
    return losses, weights


def run(options: argparse.Namespace) -> None:
    """Train as the command line says."""
    train(ParallelConfig(pp=options.pp, zero_stage=options.zero_stage), options.steps)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line cannot be used."""
    parser = ToolParser(
        prog="custom_optimizer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1, help="default 1")
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="default 100")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
