"""The machine's limit: every rank multiplies large fp32 matrices, as many at once as a comparison has ranks."""

from __future__ import annotations

import torch

from benchmarks.comparison.job import PRODUCTS, PRODUCTS_SIZE, Job, Layout, Step


def name(layout: Layout) -> str:
    """What is measured."""
    return "matrix products"


def build(job: Job) -> Step:
    """A step of products."""
    if job.layout.ranks > 1:
        torch.distributed.init_process_group("gloo")
    a, b = torch.randn(2, PRODUCTS_SIZE, PRODUCTS_SIZE).unbind(0)
    out = torch.empty_like(a)

    def step() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)

    return step
