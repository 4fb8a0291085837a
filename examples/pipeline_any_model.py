"""Train a small CNN in a pipeline: plain nn.Modules, data x pipeline parallel, in one process or in four.

    python examples/pipeline_any_model.py
    torchrun --nproc-per-node 4 examples/pipeline_any_model.py

Both print the same. The images have the shape of CIFAR's (3 x 32 x 32, ten classes) and are made up: each class is a
pattern under noise. docs/guides/any-model.md explains every line.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import OptimizerConfig, ParallelConfig
from megacore.parallel.mesh import world_size
from megacore.train.engine import Layer, PipelineEngine

STEPS, BATCH = 40, 32


def block(channels: int) -> nn.Module:
    """Convolution, norm, activation; the image keeps its shape."""
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU())


layers = [
    Layer("stem", nn.Conv2d, 3, 16, 3, stride=2, padding=1),
    Layer("block1", block, 16),
    Layer("block2", block, 16),
    Layer("block3", block, 16).tied("block1"),  # the same weights, wherever the two layers lie
    Layer("pool", nn.AvgPool2d, 4),
    Layer("flat", nn.Flatten),
    Layer("head", nn.Linear, 16 * 4 * 4, 10),
]


def images(step: int, patterns: Tensor) -> tuple[Tensor, Tensor]:
    """A batch that depends on the step only: the same on every rank and layout."""
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 10, (BATCH,), generator=draw)
    return patterns[labels] + torch.randn(BATCH, 3, 32, 32, generator=draw), labels


def right_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """How many images of a microbatch are classified as they should be."""
    return (logits.argmax(dim=1) == labels).sum()


def main() -> None:
    """Train, and print losses and accuracies on images that were not trained on."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    parallel = world_size() >= 4
    engine = PipelineEngine(
        layers,
        loss=F.cross_entropy,
        parallel=ParallelConfig(pp=2, dp=2, zero_stage=1) if parallel else ParallelConfig(),
        num_microbatches=4 if parallel else 8,  # of each replica
        optimizer=OptimizerConfig(lr=3e-3, lr_warmup_iters=5, weight_decay=0.01, clip_grad=1.0),
        train_iters=STEPS,
        seed=1,
        reproducible=True,  # the same bits on every layout with microbatches of the same size
    )
    for step in range(STEPS):
        loss = engine.train_batch(engine.split(*images(step, patterns)))
        if (step + 1) % 10 == 0:
            accuracy = engine.evaluate(engine.split(*images(10_000, patterns)), metric=right_answers)
            if engine.mesh.world.rank == 0:
                print(f"step {step + 1:3d} | loss {loss:.4f} | accuracy {accuracy:.1%}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
