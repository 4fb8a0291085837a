"""Where megacore cuts a model into pipeline stages; the peers' models are cut there too."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.comparison.job import Layout, Sizes
from benchmarks.workload import configuration
from megacore.config import ParallelConfig
from megacore.pipeline.partition import stage_ranges
from megacore.plan.outline import outline


def cut(sizes: Sizes, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Layers [start, stop) of every stage. What is not 1F1B is cut for two stages per rank, which torch's
    zero-bubble schedule wants."""
    many = layout.schedule != "1f1b"
    parallel = ParallelConfig(
        pp=layout.pp, dp=1, schedule="interleaved" if many else "1f1b", virtual_stages=2 if many else 1
    )
    config = configuration(replace(sizes, batch=4), ".", parallel=parallel, micro_batch=1, ranks=layout.pp)
    return tuple((stage.start, stage.stop) for stage in stage_ranges(outline(config), config.parallel))
