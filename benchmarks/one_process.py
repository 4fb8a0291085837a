"""Tokens per second of megacore on one process beside a plain single-file torch GPT-2 of the same shape.

    python benchmarks/one_process.py --rounds 8 --threads 2

Both run eagerly, in this process, with the same threads, batch, shapes and optimizer settings. Rounds alternate
between the two, and the median of the pairwise ratios is reported, of wall time and of CPU time: on a machine that
others use too, the second is the steadier.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig, resolve
from megacore.data.mock import MockDataset
from megacore.layers.context import BuildContext
from megacore.models.gpt import GPTLoss, gpt_layers
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams
from megacore.train.parallelize import Task
from megacore.train.trainer import Trainer


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

    def __init__(self, config: Config) -> None:
        super().__init__()
        m = config.model
        assert m.vocab_size is not None
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


def plain_step(config: Config) -> Callable[[], None]:
    """One training step of the plain model, gradients accumulated over the same microbatches."""
    training, o = config.training, config.optimizer
    assert training.global_batch_size is not None
    model = PlainGPT(config)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True)
    data = dataset(config)
    pieces = training.global_batch_size // training.micro_batch_size
    position = 0

    def step() -> None:
        nonlocal position
        adamw.zero_grad()
        for _ in range(pieces):
            samples = [data[position + i] for i in range(training.micro_batch_size)]
            position += training.micro_batch_size
            tokens, labels = (torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in ("tokens", "labels"))
            (model(tokens, labels) / pieces).backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad) if o.clip_grad else None
        adamw.step()

    return step


def megacore_step(config: Config) -> Callable[[], None]:
    """One training step of megacore's trainer on one process."""
    mesh = Mesh(device=torch.device("cpu"))
    streams = RandomStreams(1, mesh.device)
    layers = gpt_layers(config.model, BuildContext(device=mesh.device, streams=streams))
    task = Task(layers=layers, first_input=lambda batch: batch.tokens, loss=GPTLoss(config, mesh.tp), streams=streams)
    trainer = Trainer(config, mesh, task, dataset(config), None)
    return lambda: trainer.train_step(next(trainer.batches)) and None


def dataset(config: Config) -> MockDataset:
    assert config.model.vocab_size is not None
    return MockDataset(config.model.vocab_size, config.data.seq_length, 10_000_000, seed=1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 4),
        ("hidden", 256),
        ("heads", 4),
        ("seq", 256),
        ("vocab", 8192),
        ("batch", 8),
        ("micro-batch", 8),
        ("rounds", 8),
        ("steps", 3),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tied", action="store_true")
    a = parser.parse_args(argv)
    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as directory:
        config = resolve(
            Config(
                model=ModelConfig(
                    num_layers=a.layers,
                    hidden_size=a.hidden,
                    num_attention_heads=a.heads,
                    vocab_size=a.vocab,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    untie_embeddings_and_output_weights=not a.tied,
                ),
                parallel=ParallelConfig(device="cpu"),
                data=DataConfig(seq_length=a.seq, mock_data=True),
                optimizer=OptimizerConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1),
                training=TrainingConfig(
                    micro_batch_size=a.micro_batch, global_batch_size=a.batch, train_iters=100_000, output_dir=directory
                ),
            ),
            1,
        )
        steps = {"megacore": megacore_step(config), "plain torch": plain_step(config)}
        wall: dict[str, list[float]] = {name: [] for name in steps}
        cpu: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
        for _ in range(a.rounds):
            for name, step in steps.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                for _ in range(a.steps):
                    step()
                wall[name].append((time.perf_counter() - start) / a.steps)
                cpu[name].append((time.process_time() - cpu_start) / a.steps)
    for name, seconds in wall.items():
        tokens_per_second = a.batch * a.seq / statistics.median(seconds)
        print(f"{name:12} {tokens_per_second:9,.0f} tokens/s (median of {a.rounds} rounds)")
    for label, times in (("tokens/s", wall), ("tokens per CPU second", cpu)):
        ratios = [theirs / ours for ours, theirs in zip(times["megacore"], times["plain torch"], strict=True)]
        print(
            f"megacore / plain torch, {label}: {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
