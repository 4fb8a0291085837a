"""The machine's limit: every rank multiplies large fp32 matrices, as many at once as a comparison has ranks."""

from __future__ import annotations

import torch

from benchmarks.comparison.job import Job, Layout, Step

_SIZE, _COUNT = 1024, 20
FLOPS = 2.0 * _SIZE**3 * _COUNT  # of a step of one rank


def name(layout: Layout) -> str:
    """What is measured."""
    return "matrix products"


def build(job: Job) -> Step:
    """A step of products."""
    if job.layout.ranks > 1:
        torch.distributed.init_process_group("gloo")
    a, b = torch.randn(2, _SIZE, _SIZE).unbind(0)
    out = torch.empty_like(a)

    def step() -> None:
        for _ in range(_COUNT):
            torch.mm(a, b, out=out)

    return step
