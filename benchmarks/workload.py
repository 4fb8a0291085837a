"""The workload that benchmarks share: a small GPT under megacore's trainer, and the same GPT in plain torch.

Sizes by default as in one_process.py: 4 layers, hidden 256, sequence 256, vocabulary 8192, 8 sequences a step; AdamW.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import (
    AdamWConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ResolvedConfig,
    TrainingConfig,
)
from megacore.data.gpt.mock import MockDataset
from megacore.models.initialize import InitialWeights
from megacore.parallel.mesh import Mesh, world_size
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer

Step = Callable[[], None]


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Flags for the sizes of the workload and of the measurement, by name and default."""
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "seq": 256, "vocab": 8192, "batch": 8}
    for name, default in {**sizes, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def configuration(
    sizes: argparse.Namespace,
    directory: str,
    *,
    parallel: ParallelConfig,
    micro_batch: int,
    tied: bool = False,
    clip_grad: float = 0.0,
) -> ResolvedConfig:
    """The workload's configuration, resolved.

    Args:
        sizes: what `add_sizes` parsed.
        directory: for what a run writes.
        parallel: degrees, ZeRO stage, schedule.
        micro_batch: samples of a forward.
        tied: one table for embedding and head.
        clip_grad: largest gradient norm; 0 for none.
    """
    model = ModelConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        vocab_size=sizes.vocab,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        untie_embeddings_and_output_weights=not tied,
    )
    training = TrainingConfig(
        micro_batch_size=micro_batch, global_batch_size=sizes.batch, train_iters=100_000, output_dir=directory
    )
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=clip_grad)
    data = DataConfig(seq_length=sizes.seq, mock_data=True)
    config = Config(
        model=model,
        parallel=parallel,
        data=data,
        optimizer=optimizer,
        adamw=AdamWConfig(adam_beta2=0.95),
        training=training,
    )
    return config.resolve(world_size())


def megacore_trainer(config: ResolvedConfig, mesh: Mesh, *, weights: InitialWeights | None = None) -> Trainer:
    """megacore's trainer on generated data.

    Args:
        config: resolved.
        mesh: this rank's groups and device.
        weights: where initial values come from; None: drawn from the run's seed.
    """
    return Trainer(config, mesh, GPTTask(config, mesh, weights=weights), dataset(config), None)


def megacore_step(trainer: Trainer) -> Step:
    """A step of the trainer, from the data on."""

    def step() -> None:
        trainer.train_step(next(trainer.batches))

    return step


def dataset(config: ResolvedConfig) -> MockDataset:
    """Generated training data."""
    return MockDataset(config.model.vocab_size, config.data.seq_length, 10_000_000, seed=1)


class PlainBlock(nn.Module):
    """A GPT-2 block as one writes it without any framework."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in one file."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        m = config.model
        self.tokens = nn.Embedding(m.vocab_size, m.hidden_size)
        self.positions = nn.Embedding(config.data.seq_length, m.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(m.hidden_size, m.num_attention_heads) for _ in range(m.num_layers))
        self.norm = nn.LayerNorm(m.hidden_size)
        self.head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(2))
        if not m.untie_embeddings_and_output_weights:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
