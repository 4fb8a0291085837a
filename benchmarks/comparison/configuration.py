"""The configuration of the workload that benchmarks share, and its pipeline stages; nothing here loads torch."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.comparison.job import BETAS, LR, WEIGHT_DECAY, Layout, Sizes
from megacore.config import Config, ResolvedConfig, TrainingConfig, validate
from megacore.errors import ConfigError
from megacore.models.outline import outline
from megacore.pipeline.partition import stage_ranges

_WORKLOAD = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "untie_embeddings_and_output_weights": True, "mock_data": True,
    "lr": LR, "adam_beta2": BETAS[1], "weight_decay": WEIGHT_DECAY, "clip_grad": 0.0,
}  # fmt: skip


def resolved_configuration(
    sizes: Sizes | argparse.Namespace, directory: str, *, micro_batch: int, ranks: int, **changes: Any
) -> ResolvedConfig:
    """The workload's configuration, resolved.

    Args:
        sizes: of the model and the batch.
        directory: for what a run writes.
        micro_batch: samples of a forward.
        ranks: of the run.
        changes: of fields, in whatever section they are: degrees, ZeRO stage, schedule, kind of model.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    model = {"num_layers": sizes.layers, "hidden_size": sizes.hidden, "num_attention_heads": sizes.heads}
    batch = {"seq_length": sizes.seq, "global_batch_size": sizes.batch, "micro_batch_size": micro_batch}
    config = Config(training=TrainingConfig(train_iters=100_000, output_dir=directory))
    config = config.with_values({**_WORKLOAD, **model, "vocab_size": sizes.vocab, **batch, **changes})
    if problems := validate(config, ranks):
        raise ConfigError(problems)
    return config.resolve(ranks)


def layout_configuration(sizes: Sizes, layout: Layout, directory: str, **changes: Any) -> ResolvedConfig:
    """The workload's configuration on a layout.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    micro_batch = max(1, sizes.batch // (layout.dp * layout.microbatches))
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "zero_stage": layout.zero}
    changes = {**degrees, "sequence_parallel": layout.sequence_parallel, **changes}
    return resolved_configuration(sizes, directory, micro_batch=micro_batch, ranks=layout.ranks, **changes)


def cut(sizes: Sizes, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Layers [start, stop) of every stage: where megacore cuts a model, the peers' models are cut too. torch's
    zero-bubble schedule wants two per rank: where the model has enough blocks, it is cut for them.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    many = layout.schedule == "interleaved" or (layout.schedule == "zero-bubble" and sizes.layers >= 2 * layout.pp)
    schedule, virtual_stages = ("interleaved", 2) if many else ("1f1b", 1)
    config = layout_configuration(sizes, layout, ".", schedule=schedule, virtual_stages=virtual_stages)
    return tuple((stage.start, stage.stop) for stage in stage_ranges(outline(config), config))
