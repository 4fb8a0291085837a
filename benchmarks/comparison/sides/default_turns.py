"""megacore under the system's default scheduling policy: what its long turns on a core change."""

from __future__ import annotations

from benchmarks.comparison.job import Job, Layout, Step
from benchmarks.comparison.sides import megacore
from megacore.parallel import mesh


def name(layout: Layout) -> str:
    """What is measured."""
    return "megacore, default policy"


def build(job: Job) -> Step:
    """A step of the trainer."""
    mesh.take_long_turns = lambda: None
    return megacore.build(job)
