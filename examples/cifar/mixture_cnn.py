"""A small residual CNN with a mixture of experts for its head, as a list of layers for a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from images import CLASSES
from megacore.train.engine import Layer

CHANNELS, BLOCKS = 32, 4


class ResidualBlock(nn.Module):
    """Two convolutions beside the identity (He et al. 2016).

    Group norm sees one image at a time, so a batch may be cut into any parts.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, h, w] -> the same shape"""
        return torch.relu(x + self.layers(x))


class MixtureHead(nn.Module):
    """Linear experts, of which each image uses a few (Shazeer et al. 2017, arXiv 1701.06538, section 2.1).

    Args:
        features: of an image.
        classes: logits.
        experts: how many there are.
        chosen: how many an image uses.
    """

    def __init__(self, features: int, classes: int, *, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(features, experts), nn.Linear(features, experts * classes)
        self.shape, self.chosen = (experts, classes), chosen

    def forward(self, x: Tensor) -> Tensor:
        """[b, features] -> logits [b, classes]"""
        scores, chosen = self.gate(x).topk(self.chosen, dim=1)
        outputs = self.experts(x).view(-1, *self.shape)  # [b, experts, classes]; small enough to compute all
        used = outputs.gather(1, chosen.unsqueeze(2).expand(-1, -1, self.shape[1]))
        return (scores.softmax(dim=1).unsqueeze(2) * used).sum(dim=1)


def layers() -> list[Layer]:
    """The model."""
    return [
        Layer("stem", nn.Conv2d, 3, CHANNELS, 4, stride=4),
        *(Layer(f"block{i}", ResidualBlock, CHANNELS) for i in range(BLOCKS)),
        Layer("pool", nn.AvgPool2d, 2),
        Layer("flat", nn.Flatten),
        Layer("head", MixtureHead, CHANNELS * 4 * 4, CLASSES),
    ]
