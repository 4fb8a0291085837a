"""Where megacore cuts a model into pipeline stages; the peers' models are cut there too."""

from __future__ import annotations

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.comparison.job import Layout, Sizes
from megacore.models.outline import outline
from megacore.pipeline.partition import stage_ranges


def cut(sizes: Sizes, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Layers [start, stop) of every stage. torch's zero-bubble schedule wants two per rank: where the
    model has enough blocks, it is cut for them.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    many = layout.schedule == "interleaved" or (layout.schedule == "zero-bubble" and sizes.layers >= 2 * layout.pp)
    config = resolved_configuration(
        sizes,
        ".",
        micro_batch=max(1, sizes.batch // (layout.dp * layout.microbatches)),
        ranks=layout.ranks,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        zero_stage=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        schedule="interleaved" if many else "1f1b",
        virtual_stages=2 if many else 1,
    )
    return tuple((stage.start, stage.stop) for stage in stage_ranges(outline(config), config))
