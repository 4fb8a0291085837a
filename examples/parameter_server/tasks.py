"""What is learned: whether a line is English or Python. Every Python has both: its reference manual as text
(`pydoc_data`), and the sources of its standard library.

A line becomes counts of three-character pieces, hashed into `FEATURES` columns (Weinberger et al. 2009, "Feature
Hashing for Large Scale Multitask Learning"), so that any text fits.
"""

from __future__ import annotations

import ast
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor

FEATURES, HIDDEN = 512, 8
SOURCES = ("argparse", "difflib", "pickle", "threading")
SHORTEST, LINES_OF_EACH, TEST_LINES = 20, 1200, 600


@dataclass(frozen=True)
class Lines:
    """Lines as features [n, FEATURES] and labels [n]: 1 for code."""

    x: Tensor
    y: Tensor

    def batch(self, number: int, size: int) -> Lines:
        """A batch that depends on its number only."""
        rows = torch.randint(len(self.y), (size,), generator=torch.Generator().manual_seed(number))
        return Lines(self.x[rows], self.y[rows])


def load() -> tuple[Lines, Lines]:
    """Lines to learn from, and others to test with."""
    english = [line.strip() for text in topics.topics.values() for line in text.splitlines()]
    code = [line.strip() for name in SOURCES for line in _code_of(name).splitlines()]
    both = [_some(english), _some(code)]
    texts = [line for lines in both for line in lines]
    labels = torch.cat([torch.full((len(lines),), float(label)) for label, lines in enumerate(both)])
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    x = torch.stack([features(text) for text in texts])[order]
    y = labels[order].double()
    return Lines(x[TEST_LINES:], y[TEST_LINES:]), Lines(x[:TEST_LINES], y[:TEST_LINES])


def _some(lines: list[str]) -> list[str]:
    """At most `LINES_OF_EACH` different ones, none of them short, evenly out of all."""
    fitting = sorted({line for line in lines if len(line) >= SHORTEST})
    return fitting[:: -(-len(fitting) // LINES_OF_EACH)]


def features(text: str) -> Tensor:
    """[FEATURES] fp64, of length 1"""
    columns = [zlib.crc32(text[start : start + 3].encode()) % FEATURES for start in range(len(text) - 2)]
    counts = torch.bincount(torch.tensor(columns), minlength=FEATURES).double()
    return counts / counts.norm().clamp_min(1)


def _code_of(module: str) -> str:
    """The source of a module of the standard library without docstrings and comments."""
    tree = ast.parse((Path(ast.__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Logistic:
    """Logistic regression."""

    size = FEATURES + 1

    def scores(self, weights: Tensor, x: Tensor) -> Tensor:
        """[n], above 0 for code; weights: [size]"""
        return x @ weights[:FEATURES] + weights[FEATURES]

    def initial(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64)


class Net:
    """A net with one hidden layer."""

    size = FEATURES * HIDDEN + HIDDEN + HIDDEN + 1

    def scores(self, weights: Tensor, x: Tensor) -> Tensor:
        """[n], above 0 for code; weights: [size]"""
        inner, bias, outer, offset = weights.split([FEATURES * HIDDEN, HIDDEN, HIDDEN, 1])
        return torch.relu(x @ inner.view(FEATURES, HIDDEN) + bias) @ outer + offset

    def initial(self) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        return torch.randn(self.size, dtype=torch.float64, generator=draw) * 0.3


Model = Logistic | Net
MODELS: dict[str, Model] = {"logistic": Logistic(), "net": Net()}


def loss(model: Model, weights: Tensor, lines: Lines) -> Tensor:
    """Mean cross-entropy."""
    return F.binary_cross_entropy_with_logits(model.scores(weights, lines.x), lines.y)


def gradient(model: Model, weights: Tensor, lines: Lines) -> Tensor:
    """Of the mean cross-entropy, [size]."""
    leaf = weights.detach().requires_grad_()
    (found,) = torch.autograd.grad(loss(model, leaf, lines), leaf)
    return found


def accuracy(model: Model, weights: Tensor, lines: Lines) -> float:
    """Share of lines that are told right."""
    return float(((model.scores(weights, lines.x) > 0) == (lines.y > 0.5)).double().mean())
