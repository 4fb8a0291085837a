"""What every rank has a copy of: the models without their large tables.

Shape legend: b samples, f = FIELDS categories, d columns of an embedding.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from clicks import COUNTS, FIELDS, LARGE_FIELDS, SMALL_FIELDS

SMALL_ROWS = 64  # of a table that is copied; an id's row is its value modulo this number


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DenseModel(nn.Module):
    """The tables of small fields, and the order of all fields.

    Args:
        columns: of every table.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.small = nn.ModuleList(nn.Embedding(SMALL_ROWS, columns) for _ in SMALL_FIELDS)

    def embedded(self, ids: Tensor, large: Tensor) -> Tensor:
        """All embeddings, [b, f, d], from ids [b, f] and the embeddings of large fields [b, LARGE_FIELDS, d]."""
        tables = zip(SMALL_FIELDS, self.small, strict=True)
        columns = dict(zip(LARGE_FIELDS, large.unbind(1), strict=True))
        columns |= {field: table(ids[:, field] % SMALL_ROWS) for field, table in tables}
        return torch.stack([columns[field] for field in range(FIELDS)], dim=1)


class DLRM(DenseModel):
    """Naumov et al. 2019, arXiv 1906.00091: the dot products of all pairs of embeddings, and of the counts', into an
    MLP."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(columns=size)
        pairs = (FIELDS + 1) * FIELDS // 2
        self.bottom, self.top = mlp(COUNTS, 32, size), mlp(size + pairs, 64, 32, 1)
        self.register_buffer("pair", torch.triu_indices(FIELDS + 1, FIELDS + 1, offset=1), persistent=False)
        self.pair: Tensor

    def forward(self, counts: Tensor, ids: Tensor, large: Tensor) -> Tensor:
        """Logits, [b]"""
        dense = self.bottom(counts)  # [b, d]
        vectors = torch.cat([dense.unsqueeze(1), self.embedded(ids, large)], dim=1)  # [b, f + 1, d]
        products = (vectors @ vectors.transpose(1, 2))[:, self.pair[0], self.pair[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


class DeepFM(DenseModel):
    """Guo et al. 2017, arXiv 1703.04247: a factorization machine and an MLP that share their embeddings.

    The first column of every table is the weight of the category itself, the others are its vector. The sum over fields
    is divided by the root of their number: otherwise the products of all pairs start far from 0 and hide the rest.
    """

    def __init__(self, size: int = 8) -> None:
        super().__init__(columns=1 + size)
        self.linear, self.deep = nn.Linear(COUNTS, 1), mlp(FIELDS * size + COUNTS, 64, 32, 1)

    def forward(self, counts: Tensor, ids: Tensor, large: Tensor) -> Tensor:
        """Logits, [b]"""
        rows = self.embedded(ids, large) / FIELDS**0.5
        weights, vectors = rows.split([1, self.columns - 1], dim=2)
        first = weights.sum((1, 2)) + self.linear(counts).squeeze(1)
        second = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2  # all pairs in linear time
        return first + second + self.deep(torch.cat([vectors.flatten(1), counts], dim=1)).squeeze(1)


MODELS = {"dlrm": DLRM, "deepfm": DeepFM}
