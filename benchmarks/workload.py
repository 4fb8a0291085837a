"""The workload that benchmarks share: a small GPT under megacore's trainer.

Sizes by default: 4 layers, hidden 256, sequence 256, vocabulary 8192, 8 sequences per step; AdamW.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megacore.config import ResolvedConfig
from megacore.data.gpt.blend import SampleDataset
from megacore.data.gpt.mock import MockDataset
from megacore.models.initialize import InitialWeights
from megacore.parallel.mesh import Mesh
from megacore.train.freed_memory import keep_what_is_freed
from megacore.train.gpt_task import GPTTask
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer

Step = Callable[[], StepResult]


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Flags for the sizes of the workload and of the measurement, by name and default."""
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "seq": 256, "vocab": 8192, "batch": 8}
    for name, default in {**sizes, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def megacore_trainer(
    config: ResolvedConfig, mesh: Mesh, *, weights: InitialWeights | None = None, data: SampleDataset | None = None
) -> Trainer:
    """megacore's trainer, in a process that treats freed memory as a run of pretrain_gpt.py does.

    Args:
        config: resolved.
        mesh: this rank's groups and device.
        weights: where initial values come from; None: drawn from the run's seed.
        data: training data; None: generated.
    """
    if mesh.device.type == "cpu":
        keep_what_is_freed()
    return Trainer(config, mesh, GPTTask(config, mesh, weights=weights), data or dataset(config), None)


def megacore_step(trainer: Trainer) -> Step:
    """A step of the trainer, from the data on."""
    return lambda: trainer.train_step(next(trainer.batches))


def dataset(config: ResolvedConfig) -> MockDataset:
    """Generated training data."""
    return MockDataset(config.model.vocab_size, config.data.seq_length, 10_000_000, seed=1)
