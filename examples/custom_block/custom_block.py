"""Train a language model of gated convolutions (gated_convolution.py) on any layout.

    python examples/custom_block/custom_block.py
    torchrun --nproc-per-node 4 examples/custom_block/custom_block.py --tp 2 --pp 2

It learns to predict the next byte of Python's reference manual, which every Python has as text. All layouts print the
same losses, but for the last digits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_convolution import GatedConvolution
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import OptimizerConfig, ParallelConfig
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.engine import Layer, PipelineEngine

BATCH, MICROBATCHES, LENGTH, BYTES = 16, 4, 64, 256
FEATURES, CHANNELS, REACH, BLOCKS = 64, 128, 8, 4


def layers(mesh: Mesh) -> list[Layer]:
    """The model; a rank builds only those of its stages."""
    blocks = [Layer(f"block{i}", GatedConvolution, FEATURES, CHANNELS, REACH, group=mesh.layer) for i in range(BLOCKS)]
    return [
        Layer("embedding", nn.Embedding, BYTES, FEATURES),
        *blocks,
        Layer("norm", nn.LayerNorm, FEATURES),
        Layer("head", nn.Linear, FEATURES, BYTES),
    ]


def text() -> Tensor:
    """The manual, one number per byte."""
    manual = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(manual.encode("utf-8")))


def batch(manual: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow them, [BATCH, LENGTH] each; the same on every rank."""
    starts = torch.randint(len(manual) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([manual[start : start + LENGTH + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def cross_entropy(logits: Tensor, following: Tensor) -> Tensor:
    """Mean over all positions of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def train(parallel: ParallelConfig, steps: int, log_every: int) -> list[float]:
    """Train and print; the losses that were printed."""
    mesh = build_mesh(parallel)
    engine = PipelineEngine(
        layers(mesh),
        loss=cross_entropy,
        parallel=parallel,
        mesh=mesh,
        num_microbatches=max(1, MICROBATCHES // mesh.batch.size),
        optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, lr_decay_style="cosine", lr_warmup_iters=steps // 20),
        train_iters=steps,
    )
    manual, losses = text(), []
    for step in range(steps):
        loss = engine.train_batch(engine.split(*batch(manual, step)))
        if (step + 1) % log_every == 0 or step == 0:
            losses.append(float(loss))
            if mesh.world.is_first:
                print(f"step {step + 1:4d} | loss {losses[-1]:.4f}", flush=True)
    engine.close()
    return losses


def run(options: argparse.Namespace) -> None:
    """Train as the command line says."""
    parallel = ParallelConfig(tp=options.tp, pp=options.pp, schedule=options.schedule, zero_stage=options.zero_stage)
    train(parallel, options.steps, log_every=max(1, options.steps // 8))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line cannot be used."""
    parser = ToolParser(
        prog="custom_block.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks that split each block (default 1)")
    parser.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1, help="default 1")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "zero-bubble"), default="1f1b", help="default 1f1b")
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="default 200")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
