"""GPT-2 as one writes it in torch without any framework, whole or as a pipeline stage; what torch and DeepSpeed train.

Shape legend: b sequences, s positions, h hidden size, n heads of a rank, d head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.comparison.job import BETAS, EPS, LR, WEIGHT_DECAY, Job

Batch = tuple[Tensor, Tensor]  # inputs and labels, int64 [b, s] each
ADAMW: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": True}


def _in_turn(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are sorted by head, so that ranks can split them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        qkv = self.qkv(x)
        b, s, _ = qkv.shape
        q, k, v = qkv.view(b, s, -1, 3, self.head_size).transpose(1, 2).unbind(3)  # [b, n, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """A GPT-2 block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp_norm, self.mlp = nn.LayerNorm(hidden), _in_turn(up=up, gelu=nn.GELU("tanh"), down=down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """Learned positions: those of this rank where sequence parallelism splits them."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(count, hidden))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x + weight


class PlainGPT(nn.Module):
    """Consecutive layers of a GPT-2: 0 is the embedding, the last one the head, the blocks are between them.

    Args:
        job: has the sizes of the whole model, and its initial weights, if any.
        layers: that this module has, [start, stop); None: all.
    """

    def __init__(self, job: Job, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        sizes = job.sizes
        start, stop = layers or (0, sizes.layers + 2)
        self.embedding: nn.Sequential | None = None
        self.head: nn.Sequential | None = None
        if start == 0:
            tokens, positions = nn.Embedding(sizes.vocab, sizes.hidden), Positions(sizes.seq, sizes.hidden)
            nn.init.normal_(tokens.weight, std=0.02)
            self.embedding = _in_turn(tokens=tokens, positions=positions)
        blocks = range(max(start, 1), min(stop, sizes.layers + 1))
        self.blocks = nn.ModuleDict({str(layer - 1): Block(sizes.hidden, sizes.heads) for layer in blocks})
        if stop == sizes.layers + 2:
            norm, output = nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)
            self.head = _in_turn(norm=norm, output=output)
        if job.weights is not None:
            theirs = {"head.weight": "head.output.weight", "embedding.positions": "embedding.positions.weight"}
            with np.load(job.weights) as values:
                state = {theirs.get(name, name): torch.from_numpy(values[name]) for name in values.files}
            self.load_state_dict({name: state[name] for name in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of an optimizer: matrices decay, vectors do not. Distributed tensors have groups of their own, as
    torch's fused update takes no mixture."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault((parameter.dim() > 1, isinstance(parameter, DTensor)), []).append(parameter)
    return [{"params": held, "weight_decay": WEIGHT_DECAY * is_matrix} for (is_matrix, _), held in groups.items()]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of all jobs, with torch's fused update."""
    return torch.optim.AdamW(decay_groups(model), **ADAMW)


def microbatches(job: Job, replica: int) -> Iterator[Batch]:
    """A replica's microbatches without end, in megacore's order."""
    data, size = np.load(job.tokens, mmap_mode="r"), job.micro_batch
    for number in count(replica, job.layout.dp):
        samples = torch.from_numpy(np.take(data, range(number * size, (number + 1) * size), axis=0, mode="wrap"))
        yield samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
